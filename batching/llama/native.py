"""Owns llama.cpp's objects and frees each once nothing uses it. Part of the ctypes edge.

Whoever calls llama.cpp, or views its memory, holds a reference to the object meanwhile. Closing
only gives up a reference, so no thread loses memory that it still uses, and a model outlives its
contexts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C


def filled(buffer: Callable[[int], Any], capacity: int, fill: Callable[[Any, int], int]) -> Any:
    """What ``fill`` writes into a buffer, whose size it returns negated if that was too small."""
    while (n := fill(made := buffer(capacity), capacity)) < 0:
        capacity = -n
    return made[:n]


class Native:
    """Something that ``free`` frees, in the process that made it: a fork has no threads of ggml.

    used  what must outlive it
    """

    def __init__(self, handle: Any, free: Callable[[Any], object], *used: Native | None) -> None:
        self.handle = handle
        self.used = used
        self._free = free
        self._process = os.getpid()

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if self._process == getpid():
            self._free(self.handle)


class NativeModel(Native):
    """A ``llama_model *`` and its ``llama_vocab *``."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, C.llama_model_free)
        self.vocab: Any = C.llama_model_get_vocab(handle)


class NativeContext(Native):
    """A ``llama_context *`` and its ``llama_memory_t``.

    chains  samplers that it calls in a decode, by sequence
    """

    def __init__(self, handle: Any, model: NativeModel, other: NativeContext | None) -> None:
        """``other`` is the context whose memory it shares."""
        super().__init__(handle, C.llama_free, model, other)
        self.memory: Any = C.llama_get_memory(handle)
        self.chains: dict[int, Native] = {}
