"""Marks work that may never end, such as parsing a hostile grammar, for whoever watches.

A process whose engine must not block for ever reads ``overdue``, and ends. Work that calls
``checkpoint`` now and then ends by itself once nobody waits for it (``until``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

STEP_SECONDS = 600.0  # of loading without progress, or of a decode; a large model may be slow

_running: set[Watched] = set()


class Watched:
    """Marks the work inside ``with`` as ``what``, which makes progress at least every ``seconds``.

    Without progress it is overdue.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.limit = seconds
        self.waited = 0.0

    def __enter__(self) -> Watched:
        self.progress()
        _running.add(self)
        return self

    def progress(self) -> None:
        """The work goes on."""
        self.waited = 0.0

    def __exit__(self, *_: object) -> None:
        _running.discard(self)


def overdue(seconds: float) -> str:
    """What has taken longer than it should, ``seconds`` after the last call; empty if nothing has.

    So time in which this process was stopped does not count.
    """
    for work in list(_running):
        work.waited += seconds
        if work.waited > work.limit:
            return work.what
    return ""


class GivenUp(Exception):
    """Nobody waits for this work any more."""


_is_over: ContextVar[Callable[[], bool]] = ContextVar("is_over", default=lambda: False)


@contextmanager
def until(is_over: Callable[[], bool]) -> Iterator[None]:
    """Work in this thread inside ``with`` raises GivenUp at its next ``checkpoint`` once
    ``is_over()``."""
    before = _is_over.set(is_over)
    try:
        yield
    finally:
        _is_over.reset(before)


def checkpoint() -> None:
    """Raise GivenUp if nobody waits for the work of this thread any more."""
    if _is_over.get()():
        raise GivenUp
