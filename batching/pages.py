"""Memory in pages of its own."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any


def pages(n_bytes: int) -> Any:
    """An array of bytes in pages of its own, which the system gets back as soon as it is dropped.

    For copies of texts: megabytes each, of any size. In the C heap they leave holes: 78 MB after
    six minutes with eight clients.
    """
    # Private to this process, on every system.
    memory = mmap.mmap(-1, max(1, n_bytes), access=mmap.ACCESS_COPY)
    return (ctypes.c_uint8 * n_bytes).from_buffer(memory)


class Scratch:
    """Pages for one copy at a time. New ones cost 0.5 ms for each megabyte."""

    def __init__(self) -> None:
        self._pages = pages(0)

    def array(self, n_bytes: int) -> Any:
        """An array of bytes; it shares its memory with the last one."""
        if n_bytes > len(self._pages):
            self._pages = pages(n_bytes)
        return (ctypes.c_uint8 * n_bytes).from_buffer(self._pages)
