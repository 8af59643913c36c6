"""The HTTP server: the endpoint, and the page on the same port."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable
from functools import cache

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.api import anthropic, chat, embeddings, infill, metrics, native, responses
from app.api.errors import handle_errors
from app.api.service import Service
from app.api.switching import HoldModels
from app.guard import LARGEST_BODY, WILDCARDS, Guard, Names

PORTS = range(7860, 7960)  # tried in turn
MOST_CONNECTIONS = 1000
QUEUE = 128  # connections that the system keeps until they are accepted
OTHER_FILES = 200  # that the process may have open, beside connections
SILENT_SECONDS = 60.0  # that a connection may stay silent before its request is complete


def endpoint(service: Service) -> FastAPI:
    """An app with the endpoint's routes alone."""
    app = FastAPI(title="Speculation", docs_url=None, redoc_url=None)
    handle_errors(app)
    for module in (chat, responses, anthropic, embeddings, infill, native, metrics):
        app.include_router(module.routes(service))
    app.add_middleware(HoldModels)
    return app


def guard(
    app: FastAPI,
    host: str,
    allowed: Iterable[str] = (),
    keys: Collection[str] = (),
    *,
    page: bool = False,
) -> Guard:
    """``app`` behind the checks of ``Guard``.

    ``host`` is the address to listen on, ``allowed`` are further host names of the server, and
    origins whose pages may use it.
    """
    if not page:  # agents look there whether somebody listens
        app.add_api_route("/", lambda: {"endpoint": "/v1"})
    routes = {path: list(methods) for path, methods in app.openapi()["paths"].items()}
    routes["/openapi.json"] = ["get"]
    return Guard(app, Names(host, allowed), routes, keys, LARGEST_BODY, page=page)


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; None = the first free port of ``PORTS``.

    Raises OSError if there is none.
    """
    host = host.strip("[]")
    family = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0][0]
    failure: OSError | None = None
    for wanted in PORTS if port is None else (port,):
        # asyncio switches off Nagle's algorithm, which holds back an answer for 40 ms, only on
        # sockets that name their protocol.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, wanted))
            listening.listen(QUEUE)
            return listening
        except OSError as error:
            listening.close()
            failure = error
    raise failure or OSError("no port is free")


def address(host: str, listening: socket.socket) -> str:
    """The URL under which a browser on this machine finds the server."""
    name = "localhost" if host in WILDCARDS else host
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return f"http://{name}:{listening.getsockname()[1]}/"


class Connection(H11Protocol):
    """A client's connection. Closed if it asks for nothing, or to make room for another one: a
    process that can open no more files serves nobody."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._since = self._heard = self.loop.time()
        self.loop.call_later(SILENT_SECONDS, self._close_if_silent)
        most = min(MOST_CONNECTIONS, max(1, open_files() - OTHER_FILES))
        if len(self.connections) > most:
            open_ = [one for one in self.connections if isinstance(one, Connection)]
            idle = [one for one in open_ if one.is_idle and not one.transport.is_closing()]
            min(idle, key=lambda one: one._since).transport.close()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, or has answered the last one."""
        return not self.cycle or self.cycle.response_complete

    def _close_if_silent(self) -> None:
        silent = self.loop.time() - self._heard
        if silent >= SILENT_SECONDS and (not self.cycle or self.cycle.more_body):
            self.transport.close()
        elif not self.transport.is_closing():
            again = max(SILENT_SECONDS - silent, SILENT_SECONDS / 10)
            self.loop.call_later(again, self._close_if_silent)


@cache
def open_files() -> int:
    """How many files this process may have open, raised to what connections need if that is
    possible."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS + OTHER_FILES  # it has no such limit
    import resource

    wanted = MOST_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve in a thread, which ends with the process; return when it answers."""
    # asyncio accepts ``backlog`` connections in a row, before any can be closed again.
    config = uvicorn.Config(
        app, http=Connection, log_level="warning", timeout_keep_alive=60, backlog=16
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.005)
    listening.listen(QUEUE)
