"""A queue of jobs for the engine. A thread starts them in order; they emit events to the caller.

Knows nothing of models: a job is a function that emits events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from app.worker.events import Events
from app.worker.messages import Event, Failed, Waiting
from app.worker.wording import with_flags, with_labels
from batching.errors import (
    GrammarError,
    InvalidParameter,
    ModelError,
    PromptTooLong,
    SpeculationError,
)

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # how long ``close`` waits for the running jobs
MOST_WAITING = 256  # more are refused


class Needs(Enum):
    """What a job needs to start."""

    NOTHING = "nothing"  # it starts before those that wait for more
    PLACE = "a place"  # the engine has some, for as many jobs at a time
    ENGINE = "the engine"  # no other job runs meanwhile


class QueueFull(SpeculationError):
    """Too many requests wait already."""


class Job:
    """Work for the engine and its events.

    stopped   its last event if it is stopped before it starts
    runs_on   whether it goes on after ``work`` has returned, until ``JobQueue.finish``
    """

    def __init__(
        self,
        id_: str,
        work: Callable[[Job], None],
        stopped: Event,
        needs: Needs = Needs.ENGINE,
    ) -> None:
        self.id = id_
        self.work = work
        self.stopped = stopped
        self.needs = needs
        self.cancelled = threading.Event()
        self.events = Events(self.cancelled.set)
        self.n_ahead = 0
        self.runs_on = False

    def emit(self, event: Event) -> None:
        self.events.put(event)

    def fail(self, error: Exception) -> None:
        self.emit(failure(error))


class JobQueue:
    """Starts jobs in order of arrival, and tells waiting jobs their position."""

    def __init__(self, n_places: Callable[[], int]) -> None:
        """``n_places`` is how many jobs that need a place may run at a time."""
        self._n_places = n_places
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def replying(self) -> list[Job]:
        """The jobs that have a place."""
        return [job for job in self._running if job.needs is Needs.PLACE]

    def run(self, job: Job) -> Events:
        """Queue a job; its events end when it does. Closing them cancels it."""
        job.events.on_close = lambda: self._cancel(job)
        with self._changed:
            if self._closed or len(self._waiting) >= MOST_WAITING:
                many = f"{MOST_WAITING} requests wait already; try again later"
                job.fail(QueueFull("the engine is closed" if self._closed else many))
                job.events.put(None)
                return job.events
            self._waiting.append(job)
            self._tell_waiting()
            self._changed.notify_all()
        return job.events

    def stop(self, id_: str) -> None:
        with self._changed:
            jobs = [job for job in (*self._running, *self._waiting) if job.id == id_]
        for job in jobs:
            self._cancel(job)

    def finish(self, job: Job) -> None:
        """A job that ran on has ended."""
        with self._changed:
            self._running.remove(job)
            self._tell_waiting()
            self._changed.notify_all()
        job.events.put(None)

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Stop every job; return whether the running ones have ended within ``seconds``."""
        with self._changed:
            self._closed = True
            jobs = [*self._running, *self._waiting]
            self._changed.notify_all()
        for job in jobs:
            self._cancel(job)
        deadline = time.monotonic() + seconds
        # On Windows, Ctrl-C does not interrupt a wait without a timeout.
        while (self._thread.is_alive() or self._running) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not (self._thread.is_alive() or self._running)

    def _cancel(self, job: Job) -> None:
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.emit(job.stopped)
                job.events.put(None)
                self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Tell each waiting job how many others must end before it can start."""
        n_free = 0 if self._is_exclusive() else self._n_places() - len(self._running)
        n_before = n_places = 0  # waiting jobs before this one, and how many of them need a place
        loads = self._is_exclusive()
        for job in self._waiting:
            if job.needs is Needs.NOTHING:
                continue
            if job.needs is Needs.PLACE and not loads:
                n_ahead = max(0, n_places + 1 - n_free)
            else:
                n_ahead = len(self._running) + n_before
            if n_ahead and job.n_ahead != n_ahead:
                job.n_ahead = n_ahead
                job.emit(Waiting(n_ahead, loads))
            n_before += 1
            n_places += 1
            loads = loads or job.needs is Needs.ENGINE

    def _is_exclusive(self) -> bool:
        return any(job.needs is Needs.ENGINE for job in self._running)

    def _next(self) -> Job | None:
        """The job that can start now."""
        first = True
        for job in self._waiting:
            if job.needs is Needs.NOTHING:
                return job
            if first and not self._is_exclusive():
                n_running = len(self._running)
                if n_running < (self._n_places() if job.needs is Needs.PLACE else 1):
                    return job
            first = False
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                job = self._next()
                assert job is not None
                self._waiting.remove(job)
                self._running.append(job)
                self._tell_waiting()
            try:
                job.work(job)
            except Exception as error:
                if not isinstance(error, SpeculationError):
                    log.exception("a job failed")
                job.fail(error)
                job.runs_on = False
            if not job.runs_on:
                self.finish(job)


def failure(error: Exception) -> Failed:
    """An error in words for the user. Errors of our own and of the system are shown as they are."""
    if isinstance(error, OSError) and error.strerror:  # such as a file that may not be read
        name = f": {error.filename!s:.200}" if error.filename else ""
        return Failed(error.strerror + name, error.strerror + name)
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start]
        message = f"a text has {half!r}, which is half a character; give valid UTF-8 text"
        return Failed(message, message, "invalid")
    if not isinstance(error, SpeculationError):
        log.error("unexpected", exc_info=error)
        message = f"unexpected {type(error).__name__}: {error}"
        return Failed(message, message)
    kind = "error"
    if isinstance(error, PromptTooLong):
        kind = "too long"
    elif isinstance(error, InvalidParameter | GrammarError):
        kind = "invalid"
    elif isinstance(error, ModelError):
        kind = "no model"
    elif isinstance(error, QueueFull):
        kind = "busy"
    return Failed(
        with_labels(error), with_flags(error), kind, error.requested or 0, error.available or 0
    )
