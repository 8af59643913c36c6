"""Runs the requests of a call to the endpoint, all its choices at once, and gathers what comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from fastapi import Request

from app.api.errors import ApiError
from app.worker.backend import AsyncBackend
from app.worker.events import Events
from app.worker.messages import (
    Answer,
    Chance,
    ChatRequest,
    Done,
    Event,
    Failed,
    Opening,
    Prefill,
    Question,
    Text,
    Waiting,
)

T = TypeVar("T")

CLIENT_GONE = 499  # as nginx calls it; nobody reads it


@dataclass
class Gathered:
    """What came of one choice so far.

    chances  each token's probabilities
    """

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    chances: list[tuple[Chance, tuple[Chance, ...]]] = field(default_factory=list)
    opening: str = ""
    prefill: Prefill | None = None
    n_reused: int = 0
    done: Done | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Text):
            self.pieces += [text for text, _ in event.pieces]
            self.ids += event.ids
            self.chances += event.chances
        elif isinstance(event, Opening):
            self.opening = event.mark
        elif isinstance(event, Prefill):
            self.n_reused = event.done if self.prefill is None else self.n_reused
            self.prefill = event
        elif isinstance(event, Done):
            self.done = event

    def progress(self, event: Event) -> dict[str, int] | None:
        """How much of the prompt is read after ``event``, if that changes it."""
        if self.prefill is None or not isinstance(event, Prefill | Text):
            return None
        total = self.prefill.total + 1
        if isinstance(event, Text):
            if len(self.ids) > len(event.ids):
                return None
            return {"total": total, "cache": self.n_reused, "processed": total}
        return {"total": total, "cache": self.n_reused, "processed": event.done}

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Run:
    """The requests of a call, one for each choice.

    choices  what came of each so far
    """

    def __init__(
        self, backend: AsyncBackend, requests: Sequence[ChatRequest], seconds: float
    ) -> None:
        """``seconds`` is how long the call may take."""
        self.requests = requests
        self.choices = [Gathered() for _ in requests]
        self._backend = backend
        self._ends = monotonic() + seconds
        self._seconds = seconds

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of all choices as they come, with the choice's number.

        Leaving the loop stops the requests. Raises ApiError if one fails.
        """
        queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
        started: list[Events] = []
        too_late = ApiError(
            f"the reply took longer than {self._seconds:g} s and was stopped; ask for fewer "
            "tokens, or start the server with a higher --timeout",
            504,
        )
        # ``wait_for`` would do, but before Python 3.12 it loses a cancellation now and then.
        left = max(0.0, self._ends - monotonic())
        timer = asyncio.get_running_loop().call_later(left, queue.put_nowait, (0, too_late))
        n_left = len(self.requests)
        try:
            for number, request in enumerate(self.requests):
                events = self._backend.reply(request)
                started.append(events)
                events.hand_over(partial(_numbered, queue, number))
            while n_left:
                number, event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:  # after its last event
                    continue
                if isinstance(event, Failed):
                    raise ApiError.of(event)
                self.choices[number].take(event)
                n_left -= isinstance(event, Done)
                yield number, event
        finally:
            timer.cancel()
            for events in started:
                events.close()

    async def started(self) -> AsyncGenerator[tuple[int, Event], None]:
        """``events``, once the first request has started: what is wrong with it is raised here."""
        events = self.events()
        first: list[tuple[int, Event]] = []
        try:
            async for number, event in events:
                first.append((number, event))
                if not isinstance(event, Waiting | Opening):
                    break
        except BaseException:
            await events.aclose()
            raise
        return _chained(first, events)

    async def finish(self) -> list[Gathered]:
        """Run to the end."""
        async for _ in self.events():
            pass
        return self.choices


def _numbered(queue: asyncio.Queue[Any], number: int, event: Event | Exception | None) -> None:
    queue.put_nowait((number, event))


async def _chained(
    first: Sequence[tuple[int, Event]], rest: AsyncGenerator[tuple[int, Event], None]
) -> AsyncGenerator[tuple[int, Event], None]:
    try:
        for item in first:
            yield item
        async for item in rest:
            yield item
    finally:
        await rest.aclose()


async def answer(backend: AsyncBackend, question: Question) -> Any:
    """The answer to a question. Raises ApiError."""
    async for event in backend.ask(question):
        if isinstance(event, Failed):
            raise ApiError.of(event)
        if isinstance(event, Answer):
            return event.value
    raise ApiError("the engine has ended", 503)


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """Do ``work``, or give it up when the client is gone."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            raise ApiError("the client has gone", CLIENT_GONE)
        return await working
    finally:
        leaving.cancel()
        working.cancel()
