"""The server's connections: which of them have to go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app import server
from app.server import Connection

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20000000\r\n\r\n"
ASKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx"


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time goes on only in ``wait``."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def step(self) -> None:
        self.run_until_complete(asyncio.sleep(0))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()


class Wire(asyncio.Transport):
    """The way to a client."""

    def __init__(self, loop: Clock, state: ServerState, address: str = "10.0.0.1") -> None:
        super().__init__({"peername": (address, 1)})
        self.is_open = True
        self._loop = loop
        self._protocol = Connection(uvicorn.Config(_app), state, {}, loop)
        self._protocol.connection_made(self)

    def sends(self, data: bytes) -> None:
        self._protocol.data_received(data)
        self._loop.step()
        self._loop.step()

    def reads_nothing(self) -> None:
        self._protocol.pause_writing()

    def is_closing(self) -> bool:
        return not self.is_open

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self._protocol.connection_lost(None)

    def close(self) -> None:
        self.abort()

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, and answers at once or never."""
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    if scope["path"] != "/at-once":
        await asyncio.Event().wait()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def loop() -> Iterator[Clock]:
    loop = Clock()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.step()
    loop.close()


def test_a_client_that_is_too_slow_is_let_go_and_a_steady_one_is_not(loop: Clock) -> None:
    state = ServerState()
    silent, head, body, late, steady, waits, stuck = (Wire(loop, state) for _ in range(7))
    head.sends(b"GET / HTTP/1.1\r\nHost: ")
    for wire in (body, steady):
        wire.sends(HEAD)
    for wire in (waits, stuck):
        wire.sends(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
    late.sends(b"GET /at-once HTTP/1.1\r\nHost: a\r\n\r\n")
    late.sends(b"G")  # another request
    stuck.reads_nothing()
    for _ in range(180):
        loop.wait(1.0)
        for wire in (head, body, late):
            if wire.is_open:
                wire.sends(b"x")
        steady.sends(b"x" * 2000)
    wires = (silent, head, body, late, steady, waits, stuck)
    assert [wire.is_open for wire in wires] == [False, False, False, False, True, True, False]


def test_who_holds_most_places_and_says_least_gives_way(
    loop: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 5)
    state = ServerState()
    stream, asked, upload, held = (Wire(loop, state) for _ in range(4))
    other = Wire(loop, state, "10.0.0.2")
    stream.sends(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
    asked.sends(ASKED)
    for wire in (other, upload, held):
        wire.sends(HEAD)
    loop.wait(1.0)
    upload.sends(b"x")
    for gone in (held, upload, other, stream):
        assert gone.is_open
        Wire(loop, state).sends(ASKED)
        assert not gone.is_open
    assert asked.is_open
    last = Wire(loop, state)
    assert asked.is_open and not last.is_open
