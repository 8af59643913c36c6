"""A request in the engine's process, from its arrival to its last event."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from app.worker.messages import LAST, Event, Failed
from app.worker.wording import with_flags, with_labels
from batching.errors import (
    GrammarError,
    InvalidParameter,
    ModelError,
    PromptTooLong,
    SpeculationError,
)

log = logging.getLogger(__name__)


class QueueFull(SpeculationError):
    """Too many requests wait already."""


class Task:
    """A request and where its events go. The first of ``LAST`` ends it; later events are dropped.

    stopped       its last event if it is stopped before it has begun
    is_cancelled  whether it shall stop
    has_begun     whether the engine works on it
    """

    def __init__(self, pass_on: Callable[[Event], object], stopped: Event) -> None:
        self.stopped = stopped
        self.is_cancelled = self.has_begun = self.has_ended = False
        self._pass_on = pass_on
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if not self.has_ended:
                self.has_ended = isinstance(event, LAST)
                self._pass_on(event)

    def fail(self, error: Exception) -> None:
        self.emit(failure(error))

    def cancel(self) -> None:
        """Stop soon; at once if it has not begun."""
        self.is_cancelled = True
        if not self.has_begun:
            self.emit(self.stopped)


def failure(error: Exception) -> Failed:
    """An error in words for the user. Errors of our own and of the system are shown as they are."""
    if isinstance(error, OSError) and error.strerror:  # such as a file that may not be read
        name = f": {error.filename!s:.200}" if error.filename else ""
        return Failed(error.strerror + name, error.strerror + name)
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start]
        message = f"a text has {half!r}, which is half a character; give valid UTF-8 text"
        return Failed(message, message, "invalid")
    if isinstance(error, RecursionError):
        return Failed(TOO_DEEP, TOO_DEEP, "invalid")
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


TOO_DEEP = "the request cannot be sent to the engine: it is nested too deep"
