"""The replies to a call of the endpoint, all its choices at once, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from fastapi import Request

from app.api.errors import ApiError
from app.worker.backend import Backend
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
    Tokens,
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
        if isinstance(event, Tokens):
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
        if self.prefill is None or not isinstance(event, Prefill | Tokens):
            return None
        total = self.prefill.total + 1
        if isinstance(event, Tokens):
            if len(self.ids) > len(event.ids):
                return None
            return {"total": total, "cache": self.n_reused, "processed": total}
        return {"total": total, "cache": self.n_reused, "processed": event.done}

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Replies:
    """The replies to a call, one for each choice.

    choices  what came of each so far
    """

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[ChatRequest],
        seconds: float,
        at_a_time: int = 8,
    ) -> None:
        """``seconds`` is how long the call may take; ``at_a_time`` requests of it wait or run, so
        that other calls do not wait for all of them."""
        self.requests = requests
        self.choices = [Gathered() for _ in requests]
        self._backend = backend
        self._seconds = seconds
        self._at_a_time = at_a_time
        self._started: list[Events] = []
        self._came: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._seen: list[tuple[int, Event]] = []  # by ``start``, and not given out yet
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Send the requests, and wait until one has started: what is wrong with it is raised here.

        Whoever starts them must ``close`` them.
        """
        late = Failed(
            f"the reply took longer than {self._seconds:g} s and was stopped; ask for fewer "
            "tokens, or start the server with a higher --timeout",
            kind="late",
        )
        # ``wait_for`` would do, but before Python 3.12 it loses a cancellation now and then.
        self._timer = asyncio.get_running_loop().call_later(
            self._seconds, self._came.put_nowait, (0, late)
        )
        try:
            for _ in range(self._at_a_time):
                self._start_next()
            while not self._seen or isinstance(self._seen[-1][1], Waiting | Opening):
                self._seen.append(await self._next())
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The events of all choices as they come, with the choice's number.

        Raises ApiError if one fails, or if they take too long.
        """
        n_left = len(self.requests)
        while n_left:
            number, event = self._seen.pop(0) if self._seen else await self._next()
            self.choices[number].take(event)
            n_left -= isinstance(event, Done)
            yield number, event

    async def finish(self) -> list[Gathered]:
        """Run to the end."""
        try:
            await self.start()
            async for _ in self.events():
                pass
        finally:
            self.close()
        return self.choices

    def close(self) -> None:
        """Stop the requests. Idempotent."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for events in self._started:
            events.close()

    def _start_next(self) -> None:
        number = len(self._started)
        if number < len(self.requests) and not self._is_closed:
            events = self._backend.reply(self.requests[number])
            self._started.append(events)
            events.hand_over(partial(self._take, number))

    def _take(self, number: int, event: Event) -> None:
        self._came.put_nowait((number, event))
        if isinstance(event, Done):
            self._start_next()

    async def _next(self) -> tuple[int, Event]:
        number, event = await self._came.get()
        if isinstance(event, Failed):
            raise ApiError.of(event)
        return number, event


async def answer(backend: Backend, question: Question) -> Answer:
    """The answer to a question. Raises ApiError."""
    found: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    events = backend.ask(question)
    try:
        events.hand_over(lambda event: None if found.done() else found.set_result(event))
        event = await found
    finally:
        events.close()
    if isinstance(event, Answer):
        return event
    assert isinstance(event, Failed)
    raise ApiError.of(event)


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
