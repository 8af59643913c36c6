"""Mutual exclusion for an engine: a second thread gets EngineInUse instead of waiting.

llama.cpp's contexts are not thread-safe: two threads in one crash the process.
"""

from __future__ import annotations

import threading

from batching.errors import EngineInUse


def in_use() -> EngineInUse:
    return EngineInUse(
        "another thread is generating with this engine; stop it with cancelled= or close(), wait "
        "for it, or load a second engine"
    )


class Exclusive:
    """``with exclusive:`` guards a step of a text or a change of the context.

    Reentrant. Raises EngineInUse if another thread is inside. It is never held between steps, so an
    unfinished text does not block the engine.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise in_use()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
