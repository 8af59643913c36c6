"""The endpoint over HTTP in the tests' own process, with scripted replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.testclient import TestClient

from app import hosts, server
from app.api.log import RequestLog
from app.api.service import Service
from app.worker.backend import Backend
from app.worker.messages import Done, Opening, Prefill, Tokens
from tests.support.fake_backend import MODEL


def served(backend: Backend) -> str:
    """Serve ``backend`` until the tests end; returns the address."""
    listening = hosts.bind("127.0.0.1", None)
    app = server.endpoint(Service(backend, alias="tiny"))
    server.serve(server.guard(app, "127.0.0.1"), listening)
    return hosts.address("127.0.0.1", listening)


def client(backend: Any, keys: Sequence[str] = (), **service: Any) -> TestClient:
    """A client of ``backend`` without a socket, whose requests have the first key."""
    app = server.guard(server.endpoint(Service(backend, **service)), "127.0.0.1", keys=keys)
    key = {"X-Api-Key": keys[0]} if keys else {}
    return TestClient(
        RequestLog(app), "http://127.0.0.1", raise_server_exceptions=False, headers=key
    )


THOUGHT = (
    Opening("<think>\n"),
    Prefill(3, 9),
    Tokens((("hm", False), ("</think>", False), ("\n\n", False), ("Hel", False)), (1, 2, 3, 4)),
    Tokens((("lo", True),), (5,)),
)  # three of five tokens are reasoning; three of ten of the prompt were in the cache


def done(reason: str = "stop", stop_string: str = "") -> Done:
    return Done(reason, "ar", MODEL, 10, 3, 5, 1, stop_string=stop_string)
