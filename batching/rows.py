"""Token tree -> rows of a batch: token, position, seq_ids, output. Pure.

Sequence 0 is the committed text; every other sequence is one branch of the tree. A node's seq_ids
are the branches that run through it. ``docs/batches.md`` draws the table for lookahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from batching.errors import TreeTooWide
from batching.tree import Floats, TokenTree


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a ``llama_batch``, as it is shown, tested and traced."""

    token: int
    position: int
    seq_ids: tuple[int, ...]
    output: bool


@dataclass(slots=True)  # not frozen: that alone would take a microsecond a step
class Rows:
    """The rows of one batch as parallel lists, the form in which they reach the batch memory.

    Iterating gives ``Row`` objects. ``seq_ids[i]`` ascends. ``embeddings``, (n, n_embd), is what
    the first layer gets instead of the tokens' own embeddings, in models that are fed so.
    ``n_before`` rows stand in front of those of a tree: what is read of the output counts from
    there.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    seq_ids: Sequence[Sequence[int]]
    outputs: Sequence[bool]
    embeddings: Floats | None = None
    n_before: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Row:
        return Row(self.tokens[i], self.positions[i], tuple(self.seq_ids[i]), bool(self.outputs[i]))

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


def text_rows(tokens: Sequence[int], position: int, outputs: Sequence[bool]) -> Rows:
    """The rows of ``tokens`` in sequence 0 from ``position`` on."""
    n = len(tokens)
    return Rows(tokens, range(position, position + n), [range(1)] * n, outputs)


def tree_rows(tree: TokenTree, n_past: int, n_seq: int) -> Rows:
    """The rows of ``tree`` when ``n_past`` tokens are committed and ``n_seq`` sequences in use.

    The root joins every sequence, used by a branch or not: one that missed it would fall behind
    its last position and the next decode that names it would fail. For the same reason a tree that
    is one chain carries all sequences through: whatever is accepted is then in every sequence
    already, and nothing needs copying.

    Raises TreeTooWide when the tree has more branches than ``n_seq - 1``.
    """
    n = len(tree)
    if n == 1:
        return Rows(tree.tokens, [n_past], [range(n_seq)], tree.outputs)
    if _is_one_chain(tree):
        return Rows(tree.tokens, range(n_past, n_past + n), [range(n_seq)] * n, tree.outputs)
    positions = [n_past + depth for depth in tree.depths]
    seq_ids = _seq_ids(tuple(tree.parents), tuple(tree.branches), n_seq)
    return Rows(tree.tokens, positions, seq_ids, tree.outputs)


def n_sequences(tree: TokenTree) -> int:
    """How many sequences have to be in use for the rows of ``tree``: 1 for a chain."""
    if tree.n_seq:
        return tree.n_seq
    return 1 if _is_one_chain(tree) else 1 + len(branch_ends(tree.parents, tree.branches))


def _is_one_chain(tree: TokenTree) -> bool:
    """As deep as it has nodes, and no branch is named."""
    return tree.depths[-1] == len(tree) - 1 and len(tree.branches) == 1


class SeqIds(Sequence[Sequence[int]]):
    """The seq_ids of every node of a tree, also as the arrays a ``llama_batch`` points into.

    counts    ids of each node, (n_nodes,)
    pointers  address of each node's first id, (n_nodes,); valid while this object lives
    """

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self._ids = ids
        self.counts = np.array([len(some) for some in ids], np.int32)
        self._flat = np.array([seq_id for some in ids for seq_id in some], np.int32)
        ends = np.cumsum(self.counts)
        starts = (ends - self.counts).astype(np.uintp)
        self.pointers = np.uintp(self._flat.ctypes.data) + np.uintp(self._flat.itemsize) * starts

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return self._ids[i]


@lru_cache(maxsize=256)  # shapes recur: lookahead's changes with its number of n-grams alone
def _seq_ids(parents: tuple[int, ...], branches: tuple[int, ...], n_seq: int) -> SeqIds:
    ends = branch_ends(parents, branches)
    if len(ends) >= n_seq:
        raise TreeTooWide(
            f"the tree has {len(ends)} branches and needs {len(ends) + 1} sequences, {n_seq} are "
            f"in use; lower the number of branches or guesses, or reserve more sequences"
        )
    ids: list[list[int]] = [[] for _ in parents]
    for seq_id, end in enumerate(ends, 1):
        node = end
        while node:
            ids[node].append(seq_id)
            node = parents[node]
    ids[0] = list(range(n_seq))
    return SeqIds(ids)


def branch_ends(parents: Sequence[int], branches: Sequence[int]) -> list[int]:
    """The nodes that end sequences 1, 2, …: branches named by drafters, then the other leaves."""
    named = list(branches[1:])
    known = {0, *parents, *named}
    return named + [node for node in range(len(parents)) if node not in known]
