"""A queue of jobs for the engine's thread. Jobs run one at a time and emit events to the caller.

Knows nothing of models: a job is a function that emits events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from app.worker.messages import Event, Failed, Waiting
from app.worker.wording import in_page
from batching.errors import SpeculationError

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # how long ``close`` waits for the running job


class Job:
    """Work for the engine's thread and its events.

    ``stopped`` is its last event if it is stopped before it starts.
    """

    def __init__(
        self, id_: str, work: Callable[[Job], None], stopped: Event, loads: bool = False
    ) -> None:
        self.id = id_
        self.work = work
        self.stopped = stopped
        self.loads = loads
        self.cancelled = threading.Event()
        self.events: SimpleQueue[Event | None] = SimpleQueue()  # None ends it
        self.n_ahead = 0

    def emit(self, event: Event) -> None:
        self.events.put(event)

    def end(self) -> None:
        self.events.put(None)


class JobQueue:
    """Runs jobs on one thread in order of arrival, and tells waiting jobs their position."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def run(self, job: Job) -> Iterator[Event]:
        with self._changed:
            if self._closed:
                raise RuntimeError("the backend is closed")
            self._waiting.append(job)
            self._tell_waiting()
            self._changed.notify()
        try:
            while (event := job.events.get()) is not None:
                yield event
        finally:
            self._cancel(job)

    def stop(self, id_: str) -> None:
        with self._changed:
            jobs = [job for job in (self._running, *self._waiting) if job and job.id == id_]
        for job in jobs:
            self._cancel(job)

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Stop every job; return whether the running one has ended within ``seconds``."""
        with self._changed:
            self._closed = True
            jobs = [job for job in (self._running, *self._waiting) if job]
            self._changed.notify()
        for job in jobs:
            self._cancel(job)
        deadline = time.monotonic() + seconds
        # On Windows, Ctrl-C does not interrupt a join without a timeout.
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.05)
        return not self._thread.is_alive()

    def _cancel(self, job: Job) -> None:
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.emit(job.stopped)
                job.end()
                self._tell_waiting()

    def _tell_waiting(self) -> None:
        ahead = [self._running] if self._running else []
        for job in self._waiting:
            if ahead and job.n_ahead != len(ahead):
                job.n_ahead = len(ahead)
                job.emit(Waiting(len(ahead), any(other.loads for other in ahead)))
            ahead.append(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._running = job = self._waiting.popleft()
                self._tell_waiting()
            try:
                job.work(job)
            except Exception as error:
                log.exception("a job failed")
                job.emit(Failed(message_of(error)))
            with self._changed:
                self._running = None
            job.end()


def message_of(error: Exception) -> str:
    """An error in words for the user. Only errors of our own are shown as they are."""
    if isinstance(error, SpeculationError):
        return in_page(error)
    log.error("unexpected", exc_info=error)
    return f"unexpected {type(error).__name__}: {error}"
