"""Progress and cancellation of long decodes. Part of the ctypes edge.

A prompt is decoded in batches of hundreds of rows; on a slow machine, each can take a large model a
minute. On the CPU and on Metal, llama.cpp calls an abort callback after every node of the compute
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import llama_cpp.llama_cpp as C

from batching.llama.interrupts import deferred_interrupts
from batching.target import Cancelled, Watch

_SLOW = 1e10  # weight bytes times rows; about a tenth of a second on two cores
_POLL_SECONDS = 0.05
_ABORTED = 2  # return code of an aborted llama_decode
_NO_CALLBACK = C.ggml_abort_callback(0)


class DecodeWatch:
    """Runs the long decodes of one context.

    max_unwatched  rows up to which a decode is too short to be worth the overhead
    """

    def __init__(self, n_bytes: int) -> None:
        """``n_bytes`` is the size of the model's weights."""
        self.max_unwatched = int(_SLOW / n_bytes)
        self._n_nodes = 0  # in the graph, counted in the first long decode; 0 = unknown
        self._n_done = 0
        self._polled_at = 0.0
        self._watch: Watch | None = None
        self._check_interrupt: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._callback = C.ggml_abort_callback(self._node_done)

    def run(self, handle: Any, decode: Callable[[], int], watch: Watch | None) -> int:
        """Call ``decode``, a llama_decode on the context ``handle``, and return its code.

        Raises Cancelled if ``watch`` returns True, KeyboardInterrupt on Ctrl-C, and anything
        ``watch`` raises; llama.cpp has then dropped the rows.
        """
        self._n_done, self._polled_at = 0, perf_counter()
        self._watch, self._error = watch, None
        with deferred_interrupts() as self._check_interrupt:
            C.llama_set_abort_callback(handle, self._callback, None)
            try:
                code = decode()
            finally:
                C.llama_set_abort_callback(handle, _NO_CALLBACK, None)
                self._watch = None
        if self._error is not None:
            raise self._error
        if code == _ABORTED:
            raise Cancelled
        if code == 0:
            self._n_nodes = self._n_done
        return code

    def _node_done(self, _: object) -> bool:
        """Return True to abort. Exceptions must not propagate through llama.cpp."""
        self._n_done += 1
        now = perf_counter()
        if now - self._polled_at < _POLL_SECONDS:
            return False
        self._polled_at = now
        try:
            self._check_interrupt()
            share = min(1.0, self._n_done / self._n_nodes) if self._n_nodes else 0.0
            return self._watch is not None and self._watch(share)
        except BaseException as error:
            self._error = error
            return True
