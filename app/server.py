"""The HTTP server: the endpoint, and the page on the same port."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache

import uvicorn
from fastapi import FastAPI
from starlette.routing import Mount
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.api import anthropic, chat, embeddings, infill, metrics, native, responses
from app.api.errors import handle_errors
from app.api.service import Service
from app.api.switching import HoldModels
from app.guard import Guard, Names, Page
from app.hosts import QUEUE

MOST_CONNECTIONS = 1000
OTHER_FILES = 200  # that the process may have open, beside connections
SLOW_SECONDS = 60.0  # in which …
SLOWEST = 1000  # … a request comes, or so many bytes of it a second


def endpoint(service: Service) -> FastAPI:
    """An app with the endpoint's routes alone."""
    app = FastAPI(title="Speculation", docs_url=None, redoc_url=None)
    app.state.service = service
    handle_errors(app)
    for module in (chat, responses, anthropic, embeddings, infill, native, metrics):
        app.include_router(module.router)
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
    app.router.routes[:] = [
        Page(one.path, one.app) if isinstance(one, Mount) else one for one in app.router.routes
    ]
    return Guard(app, Names(host, allowed), keys, page=page)


class Connection(H11Protocol):
    """A client's connection. Closed if its client is too slow, or to make room for another one: a
    process that can open no more files serves nobody."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._began = self._heard = self.loop.time()  # the request; anything of it
        self._n_bytes = self._n_new = 0  # of the request; of it since the last check
        self._stuck: float | None = None  # since when the client does not read
        super().connection_made(transport)
        self.loop.call_later(SLOW_SECONDS, self._check)
        if len(self.connections) > min(MOST_CONNECTIONS, max(1, open_files() - OTHER_FILES)):
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        if not self._n_bytes:
            self._began = self._heard
        self._n_bytes += len(data)
        self._n_new += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._n_bytes = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stuck = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        """Whether there is no whole request that waits for its answer."""
        return not self.cycle or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> None:
        """Close some idle connections, else a stream that its client can ask for again.

        They are those of the address with the most connections, and of these the ones that were
        silent longest: an upload goes on while others only hold their place.
        """
        open_ = [one for one in self.connections if isinstance(one, Connection)]
        n_of = Counter(one._address for one in open_)
        others = [one for one in open_ if one is not self and not one.transport.is_closing()]
        found = [one for one in others if one._is_idle]
        found = found or [one for one in others if one.cycle.scope["method"] == "GET"]
        found.sort(key=lambda one: (-n_of[one._address], one._heard))
        for one in found[: 1 + len(found) // 20] or [self]:
            one.transport.close() if one._is_idle else one.transport.abort()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _check(self) -> None:
        """Close the connection if its client sends, or reads, too slowly."""
        if self not in self.connections:
            return  # it is closed
        now = self.loop.time()
        has_begun = not self.cycle or self.cycle.more_body or self._n_bytes > 0
        is_slow = self._n_new < SLOW_SECONDS * SLOWEST and now - self._began >= SLOW_SECONDS
        is_stuck = self._stuck is not None and now - self._stuck >= SLOW_SECONDS
        if (self._is_idle and has_begun and is_slow) or is_stuck:
            self.transport.abort()
            return
        self._n_new = 0
        self.loop.call_later(SLOW_SECONDS, self._check)


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
