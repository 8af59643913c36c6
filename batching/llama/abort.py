"""A decode that takes seconds: how far it is, and an end to it. Part of the ctypes edge.

A prompt is read in batches of hundreds of rows, and each of them is a minute's work for a large
model on a slow machine. llama.cpp asks a callback after every node of the compute graph whether to
go on, where the graph runs on the CPU or on Metal.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import llama_cpp.llama_cpp as C

from batching.llama.interrupts import held_interrupts
from batching.target import Cancelled, Watch

_SLOW = 1e10  # bytes of weights times rows: from about a tenth of a second on, on two cores
_EVERY_SECONDS = 0.05
_ABORTED = 2  # llama_decode's code for it
_NO_CALLBACK = C.ggml_abort_callback(0)


class DecodeWatch:
    """Runs the long decodes of one context.

    most_rows  of a decode that need not be run here: short ones would feel it
    """

    def __init__(self, n_bytes: int) -> None:
        """``n_bytes`` are those of the model's weights."""
        self.most_rows = int(_SLOW / n_bytes)
        self._n_nodes = 0  # of the graph, counted in the first long decode; 0 = not known yet
        self._n_done = 0
        self._asked_at = 0.0
        self._ask: Watch | None = None
        self._check_interrupt: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._callback = C.ggml_abort_callback(self._node_done)

    def run(self, handle: Any, decode: Callable[[], int], ask: Watch | None) -> int:
        """The code of ``decode``, a call of llama_decode with the context ``handle``.

        Raises Cancelled where ``ask`` says so, what it raised, and KeyboardInterrupt at once where
        Ctrl-C was pressed; then llama.cpp has dropped the rows.
        """
        self._n_done, self._asked_at = 0, perf_counter()
        self._ask, self._error = ask, None
        with held_interrupts() as self._check_interrupt:
            C.llama_set_abort_callback(handle, self._callback, None)
            try:
                code = decode()
            finally:
                C.llama_set_abort_callback(handle, _NO_CALLBACK, None)
                self._ask = None
        if self._error is not None:
            raise self._error
        if code == _ABORTED:
            raise Cancelled
        if code == 0:
            self._n_nodes = self._n_done
        return code

    def _node_done(self, _: object) -> bool:
        """Whether llama.cpp is to stop here. Nothing may be raised through it."""
        self._n_done += 1
        now = perf_counter()
        if now - self._asked_at < _EVERY_SECONDS:
            return False
        self._asked_at = now
        try:
            self._check_interrupt()
            share = min(1.0, self._n_done / self._n_nodes) if self._n_nodes else 0.0
            return self._ask is not None and self._ask(share)
        except BaseException as error:
            self._error = error
            return True
