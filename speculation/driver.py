"""Driver: the one thread in which an engine computes.

It loads the model, measures, decodes and frees; nobody else does, so nothing has to be guarded.
OpenMP keeps a team of threads for each thread that computes. While there are more of them than
cores, they wait for each other in the kernel instead of spinning: SmolLM2-135M wrote 65 tokens a
second instead of 130 on two cores if it was loaded and measured in another thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from batching.errors import ModelError, SpeculationError
from batching.watched import STEP_SECONDS, GivenUp, Watched, until

T = TypeVar("T")
_IDLE_SECONDS = 1.0  # without anything to do
log = logging.getLogger(__name__)


class Driver:
    """A thread that runs calls, and steps whenever there are no calls.

    step  does one step; returns False if there is nothing to do
    idle  is called once, when there was nothing to do for a second. A call or a step that comes
          meanwhile makes it raise GivenUp at its next ``checkpoint``; then it is called again later
    """

    def __init__(self, name: str) -> None:
        """``name`` says in errors what is driven."""
        self.step: Callable[[], bool] = lambda: False
        self.idle: Callable[[], None] | None = None
        self._name = name
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Event()
        self._lock = threading.Lock()  # held while a call is queued or the last one is
        self.is_closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` between two steps; return its result, or raise its exception.

        Raises ModelError once the driver is closed, SpeculationError in a forked child.
        """
        if self.is_this_thread:
            return function()
        future = self._queue(function)
        while not future.done():  # a Ctrl-C that comes just before a wait does not end that
            wait([future], 0.5)
        return future.result()

    def _queue(self, function: Callable[[], T], *, is_last: bool = False) -> Future[T]:
        """Queue a call. None comes after the last one. Raises as ``check_open``."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self.check_open()
            self._calls.append(run)
            self.is_closed = is_last  # after that, or the thread might end without it
        self.wake()
        return future

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def check_open(self) -> None:
        """Raise what ``call`` would, wherever it is called."""
        self._check_process()
        if self.is_closed:
            raise ModelError(f"{self._name} is closed; load it again")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SpeculationError(
                f"{self._name} was loaded by process {self._pid}, and a forked child cannot use "
                f"it; load it in the child"
            )

    def check_may_wait(self) -> None:
        """Raise SpeculationError where nobody may wait for the driver's thread: in itself, and in a
        forked child, which has no such thread."""
        self._check_process()
        self.check_thread()

    def check_thread(self) -> None:
        """Raise SpeculationError in the driver's thread, which must not wait for itself."""
        if self.is_this_thread:
            raise SpeculationError(
                "this was called from a callback in the engine's thread, which cannot wait for "
                "itself; do it in another thread"
            )

    def wake(self) -> None:
        """Something changed: there may be a step to do."""
        self._changed.set()

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` after the calls before it, and end the thread. Idempotent: whoever calls
        waits for the end. Raises SpeculationError from a callback, and whatever ``last`` raises."""
        self.check_thread()
        if os.getpid() != self._pid:
            return  # in a forked child there is no thread
        future: Future[None] | None = None
        with suppress(ModelError):  # it is closed, or somebody else closes it
            future = self._queue(last, is_last=True)
        self._thread.join()
        if future is not None:
            future.result()

    def _run(self) -> None:
        while True:
            self._changed.clear()
            for _ in range(len(self._calls)):  # those that come meanwhile wait for a step
                self._calls.popleft()()
            if self.is_closed and not self._calls:
                return
            has_more = False
            with Watched("a step", STEP_SECONDS):
                try:
                    has_more = self.step()
                except BaseException:  # the thread must live: calls wait for it
                    log.exception("a step failed")
            if not has_more and not self._changed.wait(_IDLE_SECONDS if self.idle else None):
                self._rest()

    def _rest(self) -> None:
        """Do what is left for idle times, until something comes."""
        work, self.idle = self.idle, None
        assert work is not None
        try:
            with Watched("a measurement", STEP_SECONDS), until(self._changed.is_set):
                work()
        except GivenUp:
            self.idle = work
        except Exception:
            log.exception("a measurement failed")
