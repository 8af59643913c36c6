"""Runs of requests without a server: what cancels them, and what ends them."""

from __future__ import annotations

import asyncio
from typing import Any

from app.api.replies import Replies
from app.worker.events import Events
from app.worker.messages import ChatRequest, Tokens


class Endless:
    """A backend whose reply goes on until it is closed."""

    def __init__(self) -> None:
        self.n_closed = 0
        self.events = Events(self._close)

    def _close(self) -> None:
        self.n_closed += 1

    def reply(self, request: ChatRequest) -> Events:
        return self.events


def test_a_cancelled_run_stops_its_requests_even_while_text_arrives() -> None:
    async def cancelled_after(n_turns: int) -> bool:
        backend: Any = Endless()
        work = asyncio.ensure_future(Replies(backend, [ChatRequest("one")], 100).finish())
        await asyncio.sleep(0.01)
        backend.events.put(Tokens((("a", False),)))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        work.cancel()
        done, _ = await asyncio.wait([work], timeout=0.2)
        return bool(done) and backend.n_closed > 0

    async def all_cancelled() -> list[bool]:
        return [await cancelled_after(n_turns) for n_turns in range(6)]

    assert asyncio.run(all_cancelled()) == [True] * 6
