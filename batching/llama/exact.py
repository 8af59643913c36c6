"""How many rows can be computed at a time with the same bits as one, for ``ContextParams.exact``.

A kernel may round in another way from some number of rows on, and neither way is more right: with
K-quants on a CPU, the logits of a row then differ by 0.1 (docs/lossless.md). Which sizes agree
depends on weights, device and build, so it is measured.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from batching.errors import ContextError
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import text_rows
from batching.target import Output
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

    Decodes the same tokens one by one and in each size, after a text of 640 tokens, or of 16 where
    that cannot be repeated, and compares all logits.
    """
    small = replace(params, n_ctx=1024, n_batch=_READ, n_ubatch=None, n_slots=1, n_seq_max=2)
    if min(model.n_positions, model.n_ctx_train) < small.n_ctx:
        small = replace(small, n_ctx=256)
    with Context(model, small) as context:
        comparison = _Comparison(context)
        known = comparison.logits([1] * _ONE_BY_ONE)
        found = 1
        for size in _SIZES:
            checkpoint()
            if size > len(known):
                known = comparison.logits([_ONE_BY_ONE] * (_SIZES[-1] // _ONE_BY_ONE))
            if size > comparison.n_most or not np.array_equal(
                comparison.logits([size]), known[:size]
            ):
                break
            found = size
    return found


class _Comparison:
    """Decodes the rows after the same text in different sizes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._n_past = 0
        self.n_most = min(_SIZES[-1], context.n_batch)
        if context.can_repeat:
            n = min(_READ, context.n_ctx // 4)
            self._decode(0, n)
            self._n_past = min(_BEFORE, context.n_ctx - 2 * self.n_most)
            try:
                context.repeat(self._n_past)
            except ContextError:  # no copies
                self._n_past = n

    def logits(self, sizes: list[int]) -> Floats:
        """The logits of rows decoded in steps of ``sizes``, (rows, n_vocab)."""
        context, position = self._context, self._n_past
        if context.n_rewind < NO_LIMIT:
            context.seq_rm(-1, 0, -1)
            self._decode(0, _ONE_BY_ONE)
            position = _ONE_BY_ONE
        found: list[Floats] = []
        for size in sizes:
            output = self._decode(position, size)
            found += [output.logits(row).copy() for row in range(size)]
            position += size
        if context.n_rewind == NO_LIMIT:
            context.seq_rm(-1, self._n_past, -1)
        return np.array(found)

    def _decode(self, position: int, n: int) -> Output:
        tokens = [(37 * (position + i) + 11) % self._context.n_vocab for i in range(n)]
        return self._context.decode(text_rows(tokens, position, [True] * n))
