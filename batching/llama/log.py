"""Starts llama.cpp and keeps the end of its log, which alone tells why something failed."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque

import llama_cpp.llama_cpp as C

from batching.llama.library import declared

_ERROR = 4  # ggml_log_level
_SHOWN = 30  # lines of the log, when llama.cpp ends the process
_recent: deque[str] = deque(maxlen=1000)
_errors: deque[str] = deque(maxlen=8)
_init_lock = threading.Lock()
_initialised = False


def _log(level: int, text: bytes, _user_data: int | None) -> None:
    line = text.decode("utf-8", "replace")
    _recent.append(line)
    if level == _ERROR:
        _errors.append(line)


def _abort(message: bytes) -> None:
    """llama.cpp ends this process: print the end of its log, which names the error, and why."""
    lines = [*recent_log().splitlines()[-_SHOWN:], message.decode("utf-8", "replace")]
    os.write(2, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


# They must outlive the library.
_log_callback = C.llama_log_callback(_log)
_AbortCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_abort_callback = _AbortCallback(_abort)


def initialise() -> None:
    """Start llama.cpp's backend, once, and redirect its log here."""
    global _initialised
    with _init_lock:
        if not _initialised:
            C.llama_log_set(_log_callback, ctypes.c_void_p(0))
            set_abort_callback = declared(
                "ggml_set_abort_callback", ctypes.c_void_p, _AbortCallback
            )
            if set_abort_callback is not None:  # exported by this build
                set_abort_callback(_abort_callback)
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
