"""Runs generations one after another, each with the whole context: what a scheduler of several
texts cannot do, such as drafting heads and recurrent models, works here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from batching.cache import check_fits
from batching.target import Cancelled
from speculation.continuation import Emitted
from speculation.generation import GenerationRequest, Host
from speculation.submitted import Submitted


class OneAtATime:
    """As ``Scheduler``: takes requests from any thread; a worker calls ``step``."""

    def __init__(self, engine: Host, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to do."""
        self._engine = engine
        self._waiting: deque[Submitted] = deque()
        self._running: tuple[Submitted, Generator[Emitted, None, None]] | None = None
        self._wake = wake

    def submit(self, request: GenerationRequest) -> Submitted:
        """Queue a request. Raises PromptTooLong if the prompt does not fit the context."""
        check_fits(len(request.prompt) - 1, self._engine.context.n_ctx)
        generation = Submitted(self._engine, request, self._wake)
        self._waiting.append(generation)
        self._wake()
        return generation

    @property
    def n_running(self) -> int:
        return int(self._running is not None)

    def end(self) -> None:
        """End all generations."""
        while self._waiting:
            self._waiting.popleft().finish("cancelled")
        self._finish("cancelled")

    def step(self) -> bool:
        """One step of the running generation, or a run of plain steps.

        Returns False if there is nothing to do.
        """
        for generation in [one for one in self._waiting if one.is_cancelled]:
            self._waiting.remove(generation)
            generation.finish("cancelled")
        if self._running is None:
            if not self._waiting:
                return False
            generation = self._waiting.popleft()
            self._running = generation, generation.steps()
        generation, steps = self._running
        try:
            emitted = None if generation.is_cancelled else next(steps, None)
        except Cancelled:
            emitted = None
        except Exception as error:
            self._running = None
            generation.fail(error)
            return True
        if emitted is not None:
            generation.deliver(emitted)
        if emitted is None or emitted.finish_reason is not None:
            self._finish("cancelled" if emitted is None else emitted.finish_reason)
        return True

    def _finish(self, reason: str | None) -> None:
        if self._running is not None:
            (generation, steps), self._running = self._running, None
            steps.close()  # leaves the text in the cache
            generation.finish(reason or "cancelled")
