"""The clock by which steps are timed. A replay of recorded texts has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

_clock: Callable[[], float] = perf_counter


def now() -> float:
    """Seconds since some moment."""
    return _clock()


@contextmanager
def using(clock: Callable[[], float]) -> Iterator[None]:
    """Time by another clock meanwhile, in all threads."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
