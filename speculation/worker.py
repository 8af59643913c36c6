"""The one thread in which an engine for several texts computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from batching.watched import STEP_SECONDS, Watched

T = TypeVar("T")


class Worker:
    """A thread that runs calls, and steps of a scheduler whenever there are no calls.

    OpenMP keeps a team of threads for each thread that computes. While there are more of them than
    cores, they wait for each other in the kernel instead of spinning: SmolLM2-135M wrote 65 tokens
    a second instead of 130 on two cores if it was loaded and measured in another thread.

    step  does one step; returns False if there is nothing to do
    """

    def __init__(self) -> None:
        self.step: Callable[[], bool] = lambda: False
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the thread; return its result, or raise its exception."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.append(run)
        self.wake()
        return future.result()

    def wake(self) -> None:
        """Something changed: there may be a step to do."""
        self._changed.set()

    def close(self) -> None:
        """End the thread after the calls before this one. Idempotent."""
        self._is_closed = True
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._changed.clear()
            while self._calls:
                self._calls.popleft()()
            if self._is_closed:
                return
            with Watched("a step", STEP_SECONDS):
                has_more = self.step()
            if not has_more:
                self._changed.wait()
