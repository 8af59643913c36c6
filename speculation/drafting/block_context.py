"""BlockContext: the context of a head that drafts a whole block in one decode, and its trees.

The head has a row for each token of the text, computed from the target's state at that token. A
block is decoded after these rows and removed by the next decode. Its positions are the levels of a
tree: the children of every node of a level are the likeliest tokens at the next position. From
these, the tree of a given size with the most expected accepted tokens is built (Ringel and Romano
2026, "Accelerating Speculative Decoding with Block Diffusion Draft Trees", arXiv 2604.12989).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batching.errors import CacheFull
from batching.rows import Rows
from batching.slots import decoding
from batching.target import END, Output
from batching.together import Coroutine, done, run
from batching.tree import Floats
from speculation.drafting.head_context import HeadKVState
from speculation.drafting.tree_growth import Scores, top_tokens
from speculation.heads.dflash import DFlashHead


class BlockContext(HeadKVState[DFlashHead]):
    """The text in the head's context, followed by a block."""

    offset = 0  # a row is computed from the state at its own token

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head, top_tokens)
        self._depth = 0  # tokens drafted per block

    def prepare(self, window: int, n_leaves: int, depth: int) -> int:
        """Set the sizes of the next text's trees; return the depth a block can reach.

        window    prompt tokens to read
        n_leaves  candidates per position; any number works
        depth     draft tokens in a row
        """
        self.window = window
        self._depth = min(depth, self.head.n_drafts, self.head.context.n_batch - 1)
        return self._depth

    def clear(self) -> None:
        """Forget the text, and free its cells."""
        self.begin(())
        self.head.context.seq_rm(0, 0, END)

    def read(self, first: int, n: int, output: Output) -> None:
        super().read(first, n, output)
        run(
            self._add_rows(first + n)
        )  # at once: the states of a whole prompt would take much memory

    def root(self, tokens: Sequence[int]) -> Coroutine[tuple[Scores, int] | None]:
        """Decode a block after ``tokens``, the whole text; return the scores of its first level.

        None if the state before the last token is unknown, or the context is full.
        """
        last = len(tokens) - 1
        yield from self._add_rows(last)
        block = [tokens[-1], *[self.head.mask] * self._depth]
        n_past, n, context = len(self._positions), len(block), self.head.context
        if not n_past or self._last_position != last - 1 or n_past + n > context.n_ctx:
            return None
        self._text += tokens[len(self._text) :]
        rows = Rows(block, range(n_past, n_past + n), [range(1)] * n, [True] * n)
        output = yield from self._decode(rows)
        self._scores = _BlockLevel(output, 0)
        return self._scores, 0

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Scores]:
        """The block's scores for the children of ``tokens``, nodes of the previous level."""
        assert self._scores is not None, "a tree begins with its root"
        above = self._scores
        self._scores = _BlockLevel(above.output, above.depth + 1)
        return done(self._scores)

    def _add_rows(self, last: int) -> Coroutine[None]:
        """Decode rows for the collected states of tokens before ``last``, if there are cells."""
        new_positions, states = self._take_states(last)
        n_batch = self.head.context.n_batch
        for start in range(0, len(new_positions), n_batch):
            chunk = new_positions[start : start + n_batch]
            n_past, n = len(self._positions), len(chunk)
            if n_past + n > self.head.context.n_ctx:
                return
            inputs = np.stack(states[start : start + n_batch])
            positions = range(n_past, n_past + n)
            rows = Rows([0] * n, positions, [range(1)] * n, [False] * n, inputs)
            try:
                yield from self._decode(rows)
            except CacheFull:  # other texts have them
                return
            self._positions += chunk

    def _decode(self, rows: Rows) -> Coroutine[Output]:
        """Decode rows after those of the text, replacing the last block."""
        self.head.context.seq_rm(0, len(self._positions), END)
        return decoding(self.head.context, rows)


class _BlockLevel:
    """The logits at one position of a block, which are the same below every node of a level."""

    def __init__(self, output: Output, depth: int) -> None:
        self.output, self.depth = output, depth

    def logits(self, row: int) -> Floats:
        return self.output.logits(1 + self.depth)
