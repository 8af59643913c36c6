"""Runs generations one after another, each with the whole context: what a scheduler of several
texts cannot do, such as a method wider than its share of the sequences, works here."""

from __future__ import annotations

from collections.abc import Callable, Generator

from batching.target import Cancelled
from speculation.continuation import Emitted
from speculation.generation import Host
from speculation.submitted import Requests, Submitted


class OneAtATime:
    """As ``Scheduler``: takes requests from any thread; a worker calls ``step``."""

    def __init__(self, engine: Host, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to do."""
        self.requests = Requests(engine, wake)
        self._running: tuple[Submitted, Generator[Emitted, None, None]] | None = None

    @property
    def n_running(self) -> int:
        return int(self._running is not None)

    def end(self) -> None:
        """End all generations."""
        self.requests.end()
        self._finish("cancelled")

    close = end

    def step(self) -> bool:
        """One step of the running generation, or a run of plain steps.

        Returns False if there is nothing to do.
        """
        self.requests.end_cancelled()
        if self._running is None:
            if not self.requests.waiting:
                return False
            generation = self.requests.waiting.popleft()
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
