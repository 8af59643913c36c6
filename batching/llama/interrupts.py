"""Ctrl-C during long llama.cpp calls: Python cannot raise through C callbacks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C, which ctypes would swallow inside a llama.cpp callback.

    Yields a function that delivers a pending one; the end of the block does, too. Does nothing
    outside the main thread, which alone receives signals.
    """
    pending: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def defer(number: int, _frame: FrameType | None) -> None:
        pending.append(number)

    def deliver() -> None:
        if pending and callable(before):
            before(pending.pop(), None)

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield deliver
        return
    signal.signal(signal.SIGINT, defer)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, before)
    deliver()
