"""How many rows can be computed at a time with the same bits as one, for ``ContextParams.exact``.

A kernel may round in another way from some number of rows on, and neither way is more right: with
K-quants on a CPU, the logits of a row then differ by 0.1 (docs/lossless.md). Which sizes agree
depends on weights, device and build, so it is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from batching.errors import ContextError
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.timing import fill
from batching.rows import text_rows
from batching.target import ALL, END, Output
from batching.tree import NO_LIMIT, Floats
from batching.watched import checkpoint

_ONE_BY_ONE = 16  # rows of the text that all sizes are compared with
_SIZES = (2, 3, 4, 5, 7, 8, 9, 12, 16, 31, 64)  # rows; kernels take 2, 3, 4, 8, 16, 32 or 64
_BEFORE = 640  # tokens; from 512 cells on, llama.cpp divides attention among threads
_READ = 128  # of them are decoded, the others are copies


_SWITCH = "GGML_CPU_TILED_MM"  # ggml reads it once a process


def use_one_kernel() -> None:
    """Switch off the second kernel that ggml has for K-quants, from 8 rows on.

    Does nothing if this process has computed before: fewer rows agree then.
    """
    if not Context.has_computed:
        os.environ.setdefault(_SWITCH, "0")


def one_kernel() -> bool:
    """Whether K-quants have one kernel only in this process."""
    return os.environ.get(_SWITCH) == "0"


def equal_rows(model: Model, params: ContextParams) -> int:
    """The most rows, up to 64, so that all sizes to there compute the bits of single rows.

    Decodes the same tokens one by one and in each size, after a text of 640 tokens, or of fewer
    where that cannot be repeated, and compares all logits.
    """
    small = replace(params, n_ctx=1024, n_batch=_READ, n_ubatch=None, n_slots=1, n_seq_max=2)
    if min(model.n_positions, model.n_ctx_train) < small.n_ctx:
        small = replace(small, n_ctx=256)
    with Context(model, small) as context:
        n_most, n_read = min(_SIZES[-1], context.n_batch), min(_READ, context.n_ctx // 4)
        n_past = n_read
        with suppress(ContextError):  # no copies
            n_past = fill(context, min(_BEFORE, context.n_ctx - 2 * n_most), n_read)
        known = _logits(context, n_past, [1] * _ONE_BY_ONE)
        found = 1
        for size in _SIZES:
            checkpoint()
            if size > len(known):
                known = _logits(context, n_past, [_ONE_BY_ONE] * (_SIZES[-1] // _ONE_BY_ONE))
            if size > n_most or not np.array_equal(_logits(context, n_past, [size]), known[:size]):
                break
            found = size
    return found


def _logits(context: Context, n_past: int, sizes: Sequence[int]) -> Floats:
    """The logits of rows decoded in steps of ``sizes`` after ``n_past`` tokens, or after 16 where
    nothing can be taken back, (rows, n_vocab)."""

    def decode(position: int, n: int) -> Output:
        tokens = [(37 * (position + i) + 11) % context.n_vocab for i in range(n)]
        return context.decode(text_rows(tokens, position, [True] * n))

    is_limited = context.n_rewind < NO_LIMIT
    if is_limited:
        n_past = _ONE_BY_ONE
        context.seq_rm(ALL, 0, END)
        decode(0, n_past)
    found: list[Floats] = []
    position = n_past
    for size in sizes:
        output = decode(position, size)
        found += [output.logits(row).copy() for row in range(size)]
        position += size
    if not is_limited:
        context.seq_rm(ALL, n_past, END)
    return np.array(found)
