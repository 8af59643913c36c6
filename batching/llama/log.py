"""Starts llama.cpp and keeps the end of its log, which alone tells why something failed."""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import llama_cpp.llama_cpp as C

_ERROR = 4  # ggml_log_level
_recent: deque[str] = deque(maxlen=1000)
_errors: deque[str] = deque(maxlen=8)
_init_lock = threading.Lock()
_initialised = False


def _log(level: int, text: bytes, _user_data: int | None) -> None:
    line = text.decode("utf-8", "replace")
    _recent.append(line)
    if level == _ERROR:
        _errors.append(line)


_log_callback = C.llama_log_callback(_log)  # must outlive the library


def initialise() -> None:
    """Start llama.cpp's backend, once, and redirect its log here."""
    global _initialised
    with _init_lock:
        if not _initialised:
            C.llama_log_set(_log_callback, ctypes.c_void_p(0))
            C.llama_backend_init()
            _initialised = True


def recent_log() -> str:
    """The lines logged since ``clear_log``, at most 1,000."""
    return "".join(_recent).strip()


def reason() -> str:
    """The first error logged since ``clear_log``, or all that was; for an error message."""
    return (_errors[0] if _errors else recent_log()).strip() or "it gave no reason"


def clear_log() -> None:
    """Forget the lines logged so far."""
    _recent.clear()
    _errors.clear()
