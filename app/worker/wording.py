"""Error messages that refer to settings as the user knows them: as fields of the page, or flags."""

from __future__ import annotations

import logging
from dataclasses import fields

from app.worker.messages import Failed
from batching.errors import (
    GrammarError,
    InvalidParameter,
    ModelError,
    PromptTooLong,
    SpeculationError,
)
from speculation.sampling import SamplingParams
from speculation.system.console import FLAGS

log = logging.getLogger(__name__)

FIELDS = {
    **FLAGS,
    "model": "“Models”",
    "draft_model": "“Draft model” under Models",
    "heads": "“Drafting heads” under Models",
    "n_ctx": "“Context” under Models",
    "kv_type": "“KV cache”",
}
# What requests call settings of the engine.
REQUEST = {
    "penalty_last_n": "repeat_last_n",
    "dry_last_n": "dry_penalty_last_n",
    "dry_breakers": "dry_sequence_breakers",
}
SAMPLING = tuple(item.name for item in fields(SamplingParams))
TOO_DEEP = "the request cannot be sent to the engine: it is nested too deep"


class QueueFull(SpeculationError):
    """Too many requests wait already."""


_KINDS = {
    "too long": PromptTooLong,
    "invalid": InvalidParameter | GrammarError,
    "no model": ModelError,
    "busy": QueueFull,
}


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
    kind = next((kind for kind, of in _KINDS.items() if isinstance(error, of)), "error")
    found = [name for name in error.settings if name in SAMPLING] if kind == "invalid" else []
    return Failed(
        error.worded(FIELDS),
        error.worded({**FLAGS, **REQUEST}),
        kind,
        error.requested or 0,
        error.available or 0,
        REQUEST.get(found[0], found[0]) if found else None,
    )
