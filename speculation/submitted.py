"""Generations that a scheduler runs beside others: their tokens arrive from another thread."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from math import inf
from time import perf_counter

from batching.cache import check_fits
from speculation.channel import Channel
from speculation.chat.detokenizer import Token
from speculation.continuation import Emitted
from speculation.fast_path import FRAME_SECONDS
from speculation.generation import Generation, GenerationRequest, Host
from speculation.sampling import SamplingParams

_MAX_FRAMES = 4  # that tokens wait for others of their text, if many texts are written


class Submitted(Generation):
    """A generation started with ``Engine.submit``: iterate over it, also with ``async for``.

    It runs whether or not anybody iterates. An error ends it and is raised where it is iterated.
    Tokens that come faster than a display shows them go together, and more of them the more texts
    are written: passing on each by itself can cost more than its decode.

    submitted     time of the request
    channel       its tokens, in groups
    is_cancelled  whether it was closed, or its request's ``cancelled`` says so
    """

    def __init__(self, engine: Host, request: GenerationRequest, wake: Callable[[], None]) -> None:
        """``wake`` tells the scheduler that something changed."""
        self.channel: Channel[list[Token]] = Channel()
        self._is_closed = False
        self._wake = wake
        self.submitted = perf_counter()
        self._frame: list[Token] = []  # tokens not passed on yet
        self._passed_on = -inf  # when others were, last
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

    def deliver(self, emitted: Emitted, n_texts: int = 1) -> None:
        """Hand out the tokens of a step, one of ``n_texts``. Called by the scheduler, as are the
        next three."""
        self._frame += self._text.release(len(emitted.tokens), emitted.n_drafted)
        if perf_counter() - self._passed_on >= FRAME_SECONDS * min(_MAX_FRAMES, -(-n_texts // 2)):
            self.flush()

    def flush(self) -> None:
        """Pass on what waits for more: the next step may take long."""
        if self._frame:
            self.channel.put(self._frame)
            self._frame, self._passed_on = [], perf_counter()

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._frame += self._text.rest()
        self.flush()
        self.channel.put(None)

    def fail(self, error: Exception) -> None:
        self.flush()
        self.channel.put(error)

    def _run(self) -> Generator[Token, None, None]:
        for tokens in self.channel:
            yield from tokens

    async def __aiter__(self) -> AsyncIterator[Token]:
        async for tokens in self.channel:
            for token in tokens:
                yield token


class Requests:
    """Requests in order of arrival, from any thread, for a scheduler to start.

    waiting  those that have not started
    """

    def __init__(self, engine: Host, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to do."""
        self.engine = engine
        self.waiting: deque[Submitted] = deque()
        self._wake = wake

    def submit(self, request: GenerationRequest) -> Submitted:
        """Queue a request. Raises PromptTooLong if the prompt does not fit the context."""
        check_fits(len(request.prompt) - 1, self.engine.context.n_ctx)
        generation = Submitted(self.engine, request, self._wake)
        self.waiting.append(generation)
        self._wake()
        return generation

    def end_cancelled(self) -> None:
        """End those that were cancelled before they started."""
        for generation in list(self.waiting):  # a copy: other threads append
            if generation.is_cancelled:
                self.waiting.remove(generation)
                generation.finish("cancelled")

    def end(self) -> None:
        """End all of them."""
        while self.waiting:
            self.waiting.popleft().finish("cancelled")
