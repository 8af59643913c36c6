"""The memory behind a ``llama_batch``, and the batch trace."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from struct import Struct
from typing import IO, Any

import llama_cpp.llama_cpp as C
import numpy as np

from batching.errors import TreeError
from batching.rows import Rows
from batching.tree import Floats

# An embedding row has four positions under M-RoPE (time and image axes), stored as consecutive
# arrays. For text the first three are equal and the last is 0.
_AXES = 4
_ID_BYTES = 4


class BatchMemory:
    """NumPy arrays that one ``llama_batch`` points into; a step fills slices of them.

    first_token, first_pos  direct access to the first row, for changing only these two
    """

    def __init__(self, n_batch: int, n_seq_max: int, *, dual_input: bool = False) -> None:
        """``dual_input``: the model reads both token and embedding of a row."""
        self.n_batch = n_batch
        self.dual_input = dual_input
        self._embd = np.zeros((0, 0), np.float32)  # allocated on first use
        self.token = np.zeros(n_batch, np.int32)
        self.pos = np.zeros(_AXES * n_batch, np.int32)
        self.n_seq_id = np.zeros(n_batch, np.int32)
        self.seq_id = np.zeros(n_batch, np.uintp)  # llama_seq_id *, one per row
        self.logits = np.zeros(n_batch, np.int8)
        # Each row's range of ids points into ``all_seqs``.
        self.all_seqs = np.arange(n_seq_max, dtype=np.int32)
        self._all_seqs_address: int = self.all_seqs.ctypes.data
        self._shared = range(0)  # ids shared by the first …
        self._n_shared = 0  # … of the rows
        self._n_tokens = 0  # mirrors the struct
        self._has_embeddings = False
        self.first_token = ctypes.c_int32.from_address(self.token.ctypes.data)
        self.first_pos = ctypes.c_int32.from_address(self.pos.ctypes.data)
        self.struct: Any = C.llama_batch(
            n_tokens=0,
            token=self.token.ctypes.data_as(ctypes.POINTER(C.llama_token)),
            embd=None,
            pos=self.pos.ctypes.data_as(ctypes.POINTER(C.llama_pos)),
            n_seq_id=self.n_seq_id.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self.seq_id.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(C.llama_seq_id))),
            logits=self.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, rows: Rows, *, all_output: bool = False) -> None:
        """Fill the batch with ``rows``; ``all_output`` gives every row output."""
        n = len(rows.tokens)
        if n > self.n_batch:
            raise TreeError(
                f"{n} rows do not fit a batch of {self.n_batch}; "
                f"lower the draft, window or guesses, or raise {{n_batch}}",
                settings=("n_batch",),
                requested=n,
                available=self.n_batch,
            )
        if n != self._n_tokens:
            self._n_tokens = self.struct.n_tokens = n
        if all_output:
            rows = replace(rows, outputs=[True] * n)
        if rows.embeddings is not None or self._has_embeddings:
            self._set_embeddings(rows.embeddings)
        ints, flags, pointers = _packers(n)
        ints(self.token, 0, *rows.tokens)
        ints(self.pos, 0, *rows.positions)
        if rows.embeddings is not None and not self.dual_input:
            self.pos[n : 3 * n].reshape(2, n)[:] = self.pos[:n]
            self.pos[3 * n : _AXES * n] = 0
        flags(self.logits, 0, *rows.outputs)
        first = rows.seq_ids[0]
        if first.stop > (n_seq := len(self.all_seqs)):
            raise TreeError(
                f"the batch needs {first.stop} sequences, the context has {n_seq}; "
                f"lower the number of branches or guesses"
            )
        if rows.seq_ids[-1] is first:  # one range for all: a prompt, a chain, a lone root
            if n > self._n_shared or first != self._shared:
                self.n_seq_id[:n] = len(first)
                self.seq_id[:n] = self._all_seqs_address + _ID_BYTES * first.start
                self._shared, self._n_shared = first, n
            return
        self._n_shared = 0
        ints(self.n_seq_id, 0, *map(len, rows.seq_ids))
        address = self._all_seqs_address
        pointers(self.seq_id, 0, *[address + _ID_BYTES * ids.start for ids in rows.seq_ids])

    def _set_embeddings(self, embeddings: Floats | None) -> None:
        """Point the batch at embeddings, or back at tokens only."""
        token = embd = None
        if embeddings is None or self.dual_input:
            token = self.token.ctypes.data_as(ctypes.POINTER(C.llama_token))
        if embeddings is not None:
            width = embeddings.shape[1]
            if width != self._embd.shape[1]:
                self._embd = np.zeros((self.n_batch, width), np.float32)
            self._embd[: len(embeddings)] = embeddings
            embd = self._embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self.struct.token, self.struct.embd = token, embd
        self._has_embeddings = embd is not None


@lru_cache(maxsize=1024)
def _packers(n: int) -> list[Callable[..., None]]:
    """Functions that write ``n`` integers, flags and pointers; faster than NumPy for lists."""
    return [Struct(f"{n}{kind}").pack_into for kind in "i?P"]


def write_trace(file: IO[str], rows: Rows) -> None:
    """Append one decode to a trace: ``[[token, position, [seq_ids], output], ...]``."""
    columns = rows.tokens, rows.positions, map(list, rows.seq_ids), map(int, rows.outputs)
    line = [*zip(*columns, strict=True)]
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()
