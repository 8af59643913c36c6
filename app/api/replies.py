"""The replies to a call of the endpoint, all its choices at once, and answers to questions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

from fastapi import Request

from app.api.errors import ApiError
from app.api.facts import Gathered
from app.api.log import current_call
from app.worker.backend import Backend
from app.worker.events import Events
from app.worker.messages import (
    LAST,
    Answer,
    ChatRequest,
    Done,
    Event,
    Failed,
    Opening,
    PromptTokens,
    Question,
    Tokens,
    Waiting,
)

T = TypeVar("T")

CLIENT_GONE = 499  # as nginx calls it; nobody reads it
PING_SECONDS = 2.0  # in which a stream says something, or clients and proxies give it up
HEADERS_SECONDS = 1.0  # that a stream's headers wait for an error, which has a status of its own


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
        ends: Container[int] = (),
    ) -> None:
        """``seconds`` is how long the call may take; ``at_a_time`` requests of it wait or run, so
        that other calls do not wait for all of them. ``ends`` are tokens that end a text."""
        self.requests = requests
        # Harnesses count the tokens of a prompt with its reply, so they get all.
        self.choices = [Gathered(ends if one.echo is None else ()) for one in requests]
        self._call = current_call()
        self._call.choices = self.choices
        self._backend = backend
        self._seconds = seconds
        self._at_a_time = at_a_time
        self._started: list[Events] = []
        self._came: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()
        self._seen: list[tuple[int, Event | None]] = []  # by ``start``, and not given out yet
        self._heard = 0.0  # when the last event came
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = False
        self._ended: set[int] = set()  # choices that a limit has ended

    async def start(self) -> None:
        """Send the requests, and wait until one has started, or waits for others: what is found
        wrong with it until then is raised here.

        Whoever starts them must ``close`` them.
        """
        late = Failed(
            f"the reply took longer than {self._seconds:g} s and was stopped; ask for fewer "
            "tokens, or start the server with a higher --timeout",
            kind="late",
        )
        # ``wait_for`` would do, but before Python 3.12 it loses a cancellation now and then.
        later, put = asyncio.get_running_loop().call_later, self._came.put_nowait
        self._timers["late"] = later(self._seconds, put, (0, late))
        self._tick()
        enough = later(HEADERS_SECONDS, put, (0, Waiting(0)))
        try:
            for _ in range(self._at_a_time):
                self._start_next()
            while not self._seen or isinstance(self._seen[-1][1], Opening | PromptTokens):
                self._seen.append(await self._next())
        except BaseException:
            self.close()
            raise
        finally:
            enough.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event | None]]:
        """The events of all choices as they come, with the choice's number, and None whenever none
        has come for PING_SECONDS. ``close`` stops them.

        Raises ApiError if one fails, or if they take too long.
        """
        if not self._timers:
            await self.start()
        n_left = len(self.requests)
        while n_left:
            number, event = self._seen.pop(0) if self._seen else await self._next()
            if event is None:
                yield number, None
                continue
            if isinstance(event, Tokens):
                event = self._limited(number, event)
            self.choices[number].take(event)
            self._call.hear(event, self.choices[number].n_reused)
            n_left -= isinstance(event, Done)
            yield number, event

    def _limited(self, number: int, tokens: Tokens) -> Tokens:
        """A choice's tokens, up to where its time or a line with too little indentation ends it."""
        if number in self._ended:
            return _cut(tokens, 0)
        request, choice = self.requests[number], self.choices[number]
        new = "".join(text for text, _ in tokens.pieces)
        seconds = perf_counter() - choice.first if choice.first else 0.0
        at = _outdent(choice.text + new, request.n_indent) if request.n_indent else None
        if at is not None:
            tokens = _cut(tokens, at - len(choice.text))
        if at is not None or (0 < request.predict_seconds < seconds and "\n" in new):
            self._ended.add(number)
            self._started[number].close()
        return tokens

    def close(self) -> None:
        """Stop the requests. Idempotent."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        for events in self._started:
            events.close()

    def _start_next(self) -> None:
        number = len(self._started)
        if number < len(self.requests) and not self._is_closed:
            events = self._backend.reply(self._call.asked(self.requests[number]))
            self._started.append(events)
            put = self._came.put_nowait
            events.hand_over(lambda event: put((number, event)))

    def _tick(self) -> None:
        """Tell whoever waits when nothing has come for a while."""
        loop = asyncio.get_running_loop()
        if self._heard and loop.time() >= self._heard + PING_SECONDS:
            self._came.put_nowait((0, None))
            self._heard = loop.time()
        due = (self._heard or loop.time()) + PING_SECONDS
        self._timers["silent"] = loop.call_at(due, self._tick)

    async def _next(self) -> tuple[int, Event | None]:
        number, event = await self._came.get()
        self._heard = asyncio.get_running_loop().time()
        if isinstance(event, Failed):
            self._call.failed = event.kind
            raise ApiError.of(event)
        if isinstance(event, Done):
            self._start_next()
        return number, event


def _outdent(text: str, n_indent: int) -> int | None:
    """Where a line after the first starts that has too little indentation: the end before it."""
    for line in re.finditer(r"\n([ \t]*)(?=[^ \t])", text):
        if len(line[1]) < n_indent:
            return line.start()
    return None


def _cut(tokens: Tokens, n: int) -> Tokens:
    """The tokens with the first ``n`` characters of their text."""
    pieces = []
    for text, drafted in tokens.pieces:
        pieces.append((text[: max(0, n)], drafted))
        n -= len(text)
    return replace(tokens, pieces=tuple(pieces))


async def last_event(events: Events) -> Event:
    """The last event of a request to the engine."""
    try:
        async for event in events:
            if isinstance(event, LAST):
                return event
    finally:
        events.close()
    raise AssertionError("it has no last event")


async def answer(backend: Backend, question: Question) -> Answer:
    """The answer to a question. Raises ApiError."""
    event = await last_event(backend.ask(question))
    if isinstance(event, Failed):
        raise ApiError.of(event)
    assert isinstance(event, Answer)
    return event


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
