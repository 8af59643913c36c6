"""One user of an engine at a time: others are refused rather than kept waiting.

llama.cpp's contexts are not for several threads at once: two of them in one end the process.
"""

from __future__ import annotations

import threading

from batching.errors import EngineInUse


def in_use() -> EngineInUse:
    return EngineInUse(
        "another thread is generating with this engine; end that text by its cancelled= or "
        "close(), wait for it, or load a second engine"
    )


class Exclusive:
    """``with exclusive:`` around what must run alone: a step of a text, a change of the context.

    A thread may enter it again. Raises EngineInUse where another thread is inside. It is held while
    something runs and never between steps, so a text that is left unfinished holds nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise in_use()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
