"""Ctrl-C while llama.cpp runs for long: Python cannot raise through its callbacks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C, which ctypes would drop where a callback of llama.cpp meets it.

    It takes effect when what is yielded is called, or at the end. In threads other than the main
    one, which get no signals, this does nothing.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def hold(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    def deliver() -> None:
        if came and callable(before):
            before(came.pop(), None)

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield deliver
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, before)
    deliver()
