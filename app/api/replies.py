"""The replies to a call of the endpoint, all its choices at once, and what comes of them."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncIterator, Awaitable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

from fastapi import Request

from app.api.errors import ApiError
from app.api.log import current_call
from app.worker.backend import Backend
from app.worker.events import Events
from app.worker.messages import (
    LAST,
    Answer,
    Chance,
    ChatRequest,
    Done,
    Event,
    Failed,
    Opening,
    Prefill,
    PromptTokens,
    Question,
    Tokens,
    Waiting,
)
from speculation.chat.tool_format import GENERIC, ToolFormat

T = TypeVar("T")

CLIENT_GONE = 499  # as nginx calls it; nobody reads it
HEADERS_SECONDS = 1.0  # that a stream's headers wait for an error, which has a status of its own


class Shown(NamedTuple):
    """A token of a reply's text.

    text     the characters it completed
    chances  its probability, and those of the likeliest tokens
    """

    text: str
    chances: tuple[Chance, tuple[Chance, ...]]


@dataclass
class Gathered:
    """What came of one choice so far.

    ends     tokens that end a text, and are not in it
    prompt   the prompt's tokens, if their probabilities come
    chances  each token's probabilities
    shown    the same of the tokens whose text is shown: not of one that ends it, nor of those that
             a stop string has cut off
    """

    ends: Container[int] = ()
    prompt: list[Shown] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    chances: list[tuple[Chance, tuple[Chance, ...]]] = field(default_factory=list)
    opening: str = ""
    calls: ToolFormat = GENERIC
    prefill: Prefill | None = None
    n_reused: int = 0
    done: Done | None = None
    began: float = 0.0  # when the prompt began to be read …
    has_read: float = 0.0  # … when it was last seen to be, or the first token came …
    first: float = 0.0  # … that is when the first tokens came …
    came: float = 0.0  # … and when the last ones did
    _held: list[Shown] = field(default_factory=list)  # without a text so far
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )  # of the prompt

    def take(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self.came = perf_counter()
            self.first = self.first or self.came
            self.has_read = self.first
            self.pieces += [text for text, _ in event.pieces]
            self.ids += event.ids
            self.chances += event.chances
            for (text, _), chances in zip(event.pieces, event.chances, strict=False):
                if chances[0].id not in self.ends:
                    self._held.append(Shown(text, chances))
                    if text:
                        self._show()
        elif isinstance(event, PromptTokens):
            decode = self._decoder.decode
            self.prompt += [Shown(decode(one[0].piece), one) for one in event.chances]
        elif isinstance(event, Opening):
            self.opening, self.calls = event.mark, event.calls
        elif isinstance(event, Prefill):
            self.n_reused = event.done if self.prefill is None else self.n_reused
            self.has_read = perf_counter()
            self.began = self.has_read if self.prefill is None else self.began
            self.prefill = event
        elif isinstance(event, Done):
            self.done = event
            if not event.stop_string:
                self._show()

    def _show(self) -> None:
        self.shown += self._held
        self._held = []

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
    def so_far(self) -> Done:
        """Counters and times while it runs, as far as they are seen from here."""
        n_read = self.prefill.done if self.prefill is not None else 0
        n_tokens = len(self.ids)
        return Done(
            "",
            n_prompt=n_read + bool(n_tokens),
            n_reused=self.n_reused,
            n_read=n_read - self.n_reused + bool(n_tokens),
            n_tokens=n_tokens,
            n_first=min(1, n_tokens),
            prefill_seconds=self.has_read - self.began,
            decode_seconds=self.came - self.has_read if n_tokens else 0.0,
        )

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
        self._came: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._seen: list[tuple[int, Event]] = []  # by ``start``, and not given out yet
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._began: dict[int, float] = {}  # when each choice's first tokens came
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
        self._timer = later(self._seconds, put, (0, late))
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

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The events of all choices as they come, with the choice's number.

        Raises ApiError if one fails, or if they take too long.
        """
        n_left = len(self.requests)
        while n_left:
            number, event = self._seen.pop(0) if self._seen else await self._next()
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
        request, now = self.requests[number], asyncio.get_running_loop().time()
        seconds = now - self._began.setdefault(number, now)
        new = "".join(text for text, _ in tokens.pieces)
        if 0 < request.predict_seconds < seconds and "\n" in new:
            self._ended.add(number)
        if request.n_indent:
            before = self.choices[number].text
            at = _outdent(before + new, request.n_indent)
            if at is not None:
                self._ended.add(number)
                tokens = _cut(tokens, at - len(before))
        if number in self._ended:
            self._started[number].close()
        return tokens

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
            self._call.failed = event.kind
            raise ApiError.of(event)
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
    found: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

    def take(event: Event) -> None:
        if isinstance(event, LAST) and not found.done():
            found.set_result(event)

    try:
        events.hand_over(take)
        return await found
    finally:
        events.close()


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
