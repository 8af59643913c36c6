"""Marks work that may never end, such as parsing a hostile grammar, for whoever watches.

Nothing here ends the work. A process whose engine must not block for ever reads ``overdue``.
"""

from __future__ import annotations

from time import monotonic

STEP_SECONDS = 600.0  # of loading without progress, or of a decode; a large model may be slow
GRAMMAR_SECONDS = 10.0

_running: dict[Watched, float] = {}  # when each is overdue


class Watched:
    """Marks the work inside ``with`` as ``what``, which makes progress at least every ``seconds``.

    Without progress it is overdue.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self._seconds = seconds

    def __enter__(self) -> Watched:
        self.progress()
        return self

    def progress(self) -> None:
        """The work goes on."""
        _running[self] = monotonic() + self._seconds

    def __exit__(self, *_: object) -> None:
        _running.pop(self, None)


def overdue() -> str:
    """What has taken longer than it should; empty if nothing has."""
    now = monotonic()
    return next((work.what for work, due in list(_running.items()) if now > due), "")
