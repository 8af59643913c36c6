"""The HTTP server: the endpoint, and the page on the same port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Iterable

import uvicorn
from fastapi import FastAPI

from app.api import anthropic, chat, embeddings, infill, metrics, native, responses
from app.api.errors import handle_errors
from app.api.service import Service
from app.api.switching import HoldModels
from app.guard import LARGEST_BODY, WILDCARDS, Guard, Names

PORTS = range(7860, 7960)  # tried in turn


def endpoint(service: Service) -> FastAPI:
    """An app with the endpoint's routes alone."""
    app = FastAPI(title="Speculation", docs_url=None, redoc_url=None)
    handle_errors(app)
    for module in (chat, responses, anthropic, embeddings, infill, native, metrics):
        app.include_router(module.routes(service))
    app.add_middleware(HoldModels)
    return app


def guard(
    app: FastAPI, host: str, allowed: Iterable[str] = (), keys: Collection[str] = ()
) -> Guard:
    """``app`` behind the checks of ``Guard``.

    ``host`` is the address to listen on, ``allowed`` are further host names of the server.
    """
    paths = frozenset(app.openapi()["paths"])
    return Guard(app, Names(host, allowed), paths, keys, LARGEST_BODY)


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; None = the first free port of ``PORTS``.

    Raises OSError if there is none.
    """
    host = host.strip("[]")
    family = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0][0]
    failure: OSError | None = None
    for wanted in PORTS if port is None else (port,):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, wanted))
            listening.listen(128)
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


def serve(app: Guard, listening: socket.socket) -> None:
    """Serve in a thread, which ends with the process; return when it answers."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=60))
    thread = threading.Thread(target=server.run, args=([listening],), name="server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.005)
