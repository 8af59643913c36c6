"""BlockContext: a text in the context of a head that drafts a block at once, and trees.

The head has a row for each token of the text, made of the target's state at that token as soon as
it is known. A block is decoded behind them, and goes with the next decode. Its places are the
levels of a tree: below any node of one level are the likeliest tokens of the next place, by which
the tree of a given size that is likeliest to hold is found (Ringel and Romano 2026, "Accelerating
Speculative Decoding with Block Diffusion Draft Trees", arXiv 2604.12989).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batching.cache import END
from batching.rows import Rows
from batching.target import Output
from batching.tree import Floats
from speculation.drafting.head_context import HeadKVState
from speculation.drafting.tree_growth import Scores
from speculation.heads.base import BlockHead


class BlockContext(HeadKVState[BlockHead]):
    """The text in the head's context, and the block behind it."""

    ahead = 0  # a row is made of the state at its own token

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head, _named)
        self._depth = 0  # tokens that a block drafts
        self._width = 1  # tokens that are looked at of each place
        self._scores: _Place | None = None

    def prepare(self, window: int, n_leaves: int, depth: int) -> int:
        """A text will be drafted ``depth`` tokens deep, ``n_leaves`` looked at of each place, by
        ``window`` tokens of its prompt: how deep a block of the head goes at most."""
        self.window = window
        self._width = n_leaves
        self._depth = min(depth, self.head.n_drafts, self.head.context.n_batch - 1)
        return self._depth

    def read(self, first: int, n: int, output: Output) -> None:
        super().read(first, n, output)
        self._add_rows(first + n)  # now, as all the states of a prompt are many

    def root(self, tokens: Sequence[int]) -> tuple[Scores, int] | None:
        """Decode a block below the last of ``tokens``, the whole text: what it says of the next.

        None where the state before the last token is unknown, or the context has no room.
        """
        last = len(tokens) - 1
        self._add_rows(last)
        block = self.head.block(tokens[-1], self._depth)
        n_past, n, context = len(self._places), len(block), self.head.context
        if not n_past or self._done != last - 1 or n_past + n > context.n_ctx:
            return None
        self._text += tokens[len(self._text) :]
        output = self._decode(Rows(block, range(n_past, n_past + n), [range(1)] * n, [True] * n))
        self._scores = _Place(self.head, output, 0, tokens[-1:], self._width)
        return self._scores, 0

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Scores:
        """What the block says of the place below ``tokens``, nodes of the place before."""
        assert self._scores is not None, "a tree begins with its root"
        above = self._scores
        self._scores = _Place(self.head, above.output, above.depth + 1, tokens, self._width)
        return self._scores

    def _add_rows(self, last: int) -> None:
        """Make rows of the states that came, of tokens before ``last``."""
        places, states = self._take_states(last)
        n_batch = self.head.context.n_batch
        for start in range(0, len(places), n_batch):
            some = places[start : start + n_batch]
            n_past, n = len(self._places), len(some)
            if n_past + n > self.head.context.n_ctx:
                return
            fed = np.stack(states[start : start + n_batch])
            positions = range(n_past, n_past + n)
            self._decode(Rows([0] * n, positions, [range(1)] * n, [False] * n, fed))
            self._places += some

    def _decode(self, rows: Rows) -> Output:
        """Decode rows behind those of the text, where the last block still is."""
        self.head.context.seq_rm(0, len(self._places), END)
        return self.head.context.decode(rows)


class _Place:
    """What a block says of one of its places, for each of the nodes above it."""

    def __init__(
        self, head: BlockHead, output: Output, depth: int, above: Sequence[int], most: int
    ) -> None:
        self.output = output
        self.depth = depth
        self._head = head
        self._above = above
        self._most = most

    def logits(self, row: int) -> Floats:
        return self._head.candidates(self.output, self.depth, self._above[row], self._most)


def _named(row: Floats, n: int) -> list[tuple[int, float]]:
    """The first ``n`` of what ``BlockHead.candidates`` gave, as tokens and probabilities."""
    return [(int(token), float(prob)) for token, prob in row.T[:n]]
