"""The endpoint over HTTP in the tests' own process, with scripted replies."""

from __future__ import annotations

from app import hosts, server
from app.api.service import Service
from app.worker.messages import Done, Opening, Prefill, Tokens
from tests.support.fake_backend import MODEL, FakeBackend


def served(backend: FakeBackend) -> str:
    """Serve ``backend`` until the tests end; returns the address."""
    listening = hosts.bind("127.0.0.1", None)
    app = server.endpoint(Service(backend, alias="tiny"))
    server.serve(server.guard(app, "127.0.0.1"), listening)
    return hosts.address("127.0.0.1", listening)


THOUGHT = (
    Opening("<think>\n"),
    Prefill(3, 9),
    Tokens((("hm", False), ("</think>", False), ("\n\n", False), ("Hel", False)), (1, 2, 3, 4)),
    Tokens((("lo", True),), (5,)),
)  # three of five tokens are reasoning; three of ten of the prompt were in the cache


def done(reason: str = "stop", stop_string: str = "") -> Done:
    return Done(reason, "ar", MODEL, 10, 3, 5, 1, stop_string=stop_string)
