"""A generation that a scheduler runs beside others: its tokens arrive from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from queue import Empty, SimpleQueue
from time import perf_counter

from speculation.chat.detokenizer import Token
from speculation.continuation import Emitted
from speculation.generation import Generation, GenerationRequest, Host
from speculation.sampling import SamplingParams


class Submitted(Generation):
    """A generation started with ``Engine.submit``: iterate over it, also with ``async for``.

    It runs whether or not anybody iterates. An error ends it and is raised where it is iterated.

    submitted     time of the request
    is_cancelled  whether it was closed, or its request's ``cancelled`` says so
    """

    def __init__(self, engine: Host, request: GenerationRequest, wake: Callable[[], None]) -> None:
        """``wake`` tells the scheduler that something changed."""
        self._queue: SimpleQueue[list[Token] | Exception | None] = SimpleQueue()
        self._is_closed = False
        self._wake = wake
        self._notify: Callable[[], object] = lambda: None  # tells an asyncio loop of a new item
        self.submitted = perf_counter()
        super().__init__(engine, request)

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling

    @property
    def is_cancelled(self) -> bool:
        cancelled = self.request.cancelled
        return self._is_closed or (cancelled is not None and cancelled())

    def close(self) -> None:
        """Stop here. What was generated stays readable."""
        self._is_closed = True
        self._wake()

    end = close

    def deliver(self, emitted: Emitted) -> None:
        """Hand out the tokens of a step. Called by the scheduler, as are the next two."""
        self._put(list(self._text.release(len(emitted.tokens), emitted.n_drafted)))

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._put(list(self._text.rest()))
        self._put(None)

    def fail(self, error: Exception) -> None:
        self._put(error)

    def _put(self, item: list[Token] | Exception | None) -> None:
        self._queue.put(item)
        self._notify()

    def _run(self) -> Generator[Token, None, None]:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield from item

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            ready.clear()
            try:
                item = self._queue.get_nowait()
            except Empty:
                await ready.wait()
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            for token in item:
                yield token
