"""Reply: what whoever asked for a text holds while the engine writes it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from speculation.chat.detokenizer import ReplyText, Token
from speculation.chat.reasoning import answer_of
from speculation.drafter import Method
from speculation.meter import RecordedStep, Stats
from speculation.request import Request
from speculation.sampling import TokenLogprobs
from speculation.system.channel import Channel


class Reply:
    """A text that the engine writes; iterate over it for its tokens, with ``for`` or ``async for``.

    It is written whether or not anybody iterates. Leaving a loop early cancels it; ``next`` takes
    one token and cancels nothing. An error ends it and is raised where it is iterated.

    request        what was asked
    stats          counters and times
    finish_reason  ``stop`` (end-of-generation token or stop string), ``length`` (max_tokens),
                   ``context`` (full) or ``cancelled``; None while it is written or after an error
    error          what ended it instead
    logprobs       of ``token_ids``, in order, if the request asks for them; perhaps of a few more
    steps          in order, if the request asks for them
    """

    def __init__(
        self,
        request: Request,
        written: ReplyText,
        wake: Callable[[], None] = lambda: None,
        check_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` tells the engine's thread that something changed; ``check_thread`` raises
        SpeculationError in that thread, which must not wait for tokens that it has to write, and in
        a forked child, where nobody writes them."""
        self.request = request
        self.stats = Stats(n_prompt=len(request.prompt))
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.steps: list[RecordedStep] = []
        self.is_cancelled = self.has_ended = False
        self._written, self._wake, self._check_thread = written, wake, check_thread
        self.ended = threading.Event()
        self._channel: Channel[list[Token]] = Channel()
        self._taken: deque[Token] = deque()  # from the channel, for ``next``

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return list(self.request.prompt)

    @property
    def method(self) -> Method:
        return self.request.method

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, including one that ended the text."""
        return self._written.ids

    @property
    def text(self) -> str:
        """The text so far, without a stop string or control tokens at its end."""
        return self._written.shown

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty if none did."""
        return self._written.stopped_by

    @property
    def answer(self) -> str:
        """The text without the reasoning; the whole text while the model is still reasoning."""
        return answer_of(self.text, self.request.opening)

    def __next__(self) -> Token:
        self._check_may_wait()
        while True:
            with suppress(IndexError):
                return self._taken.popleft()
            if (tokens := self._channel.get()) is None:
                raise StopIteration
            self._taken += tokens

    def __iter__(self) -> Iterator[Token]:
        self._check_may_wait()
        try:
            while (token := next(self, None)) is not None:
                yield token
        finally:
            self._cancel_unless_ended()

    async def __aiter__(self) -> AsyncIterator[Token]:
        self._check_may_wait()
        groups = aiter(self._channel)
        try:
            while self._taken:
                yield self._taken.popleft()
            async for tokens in groups:
                for token in tokens:
                    yield token
        finally:
            self._cancel_unless_ended()

    def run(self) -> Reply:
        """Wait for the end; return self. Raises the error that ended the text.

        The caller sleeps until then: to wake it for each group of tokens takes a core from a small
        model's decode.
        """
        self._check_may_wait()
        try:
            while not self.ended.wait(1.0):  # on Windows, Ctrl-C does not interrupt an endless one
                pass
        finally:
            self._cancel_unless_ended()
        if self.error is not None:
            raise self.error
        return self

    def _check_may_wait(self) -> None:
        if not self.has_ended:
            self._check_thread()

    def _cancel_unless_ended(self) -> None:
        if not self.has_ended:
            self.cancel()

    def forward(self, listener: Callable[[list[Token] | Exception | None], object]) -> None:
        """Call ``listener`` with each group of tokens, in the engine's thread, then with None, or
        with the error that ended the text."""
        self._channel.forward(listener)

    def cancel(self) -> None:
        """End the text within a step. What was generated stays readable. From any thread."""
        self.is_cancelled = True
        self._wake()

    def pass_on(self, item: list[Token] | Exception | None) -> None:
        """Give a group of tokens to whoever waits for them, or the end. From the engine's thread,
        which sets ``ended`` afterwards."""
        self._channel.put(item)
