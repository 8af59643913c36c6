"""Turns a token tree into batch rows: token, position, seq_ids, output. Pure.

Sequence 0 is the committed text; every other sequence is one branch of the tree. A node's seq_ids
are the branches that run through it. ``docs/batches.md`` draws lookahead's table.
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
    """One row of a ``llama_batch``, for display, tests and traces."""

    token: int
    position: int
    seq_ids: tuple[int, ...]
    output: bool


@dataclass(slots=True)  # not frozen: that would cost a microsecond per step
class Rows:
    """The rows of one batch as parallel lists, ready to be packed into the batch memory.

    Iterating yields ``Row`` objects. ``seq_ids[i]`` is ascending. ``embeddings``, (n, n_embd),
    replace the token embeddings at the first layer. ``n_before`` rows precede those of the tree;
    row numbers in ``Output`` count from the tree's first row.
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


def text_rows(
    tokens: Sequence[int], position: int, outputs: Sequence[bool], n_seq: int = 1
) -> Rows:
    """Rows for ``tokens`` in the first ``n_seq`` sequences, starting at ``position``."""
    n = len(tokens)
    return Rows(tokens, range(position, position + n), [range(n_seq)] * n, outputs)


def tree_rows(tree: TokenTree, n_past: int, n_seq: int) -> Rows:
    """Rows for ``tree`` with ``n_past`` tokens committed and ``n_seq`` sequences in use.

    The root joins every sequence, even those without a branch: a sequence that misses a position
    makes the next decode that names it fail. A chain also joins every sequence, so accepted tokens
    need no copy.

    A root with two children, ``n_past`` 10 and ``n_seq`` 3::

        node   position  seq_ids
        root   10        0 1 2
        left   11        1
        right  11        2

    Raises TreeTooWide if the tree has more than ``n_seq - 1`` branches.
    """
    n = len(tree)
    if n == 1:
        return Rows(tree.tokens, [n_past], [range(n_seq)], tree.outputs)
    if _is_one_chain(tree):
        return Rows(tree.tokens, range(n_past, n_past + n), [range(n_seq)] * n, tree.outputs)
    positions = [n_past + depth for depth in tree.depths]
    seq_ids = _seq_ids(tuple(tree.parents), tuple(tree.branches), n_seq)
    return Rows(tree.tokens, positions, seq_ids, tree.outputs)


def pack(parts: Sequence[tuple[Rows, int]]) -> tuple[Rows, list[int]]:
    """The rows of several texts as one batch, and for each text the row of its tree's root.

    A part is a text's rows and the first of its sequences, which becomes its sequence 0. All rows
    have embeddings, or none.
    """
    if len(parts) == 1:
        ((rows, first),) = parts
        if not first:
            return rows, [0]
    tokens: list[int] = []
    positions: list[int] = []
    seq_ids: list[Sequence[int]] = []
    outputs: list[bool] = []
    starts = []
    for rows, first in parts:
        starts.append(len(tokens) + rows.n_before)
        tokens += rows.tokens
        positions += rows.positions
        outputs += rows.outputs
        ids = rows.seq_ids
        if ids[-1] is ids[0]:  # a prompt, a chain or a lone root: one range for all
            seq_ids += [range(first + ids[0][0], first + ids[0][-1] + 1)] * len(ids)
        else:
            seq_ids += (ids if isinstance(ids, SeqIds) else SeqIds(ids)).moved(first)
    embeddings = [rows.embeddings for rows, _ in parts if rows.embeddings is not None]
    joined = np.concatenate(embeddings) if embeddings else None
    return Rows(tokens, positions, seq_ids, outputs, joined), starts


def rows_back(rows: Rows, n_rewind: int) -> dict[int, int]:
    """How many rows of each sequence can be taken back after a decode of ``rows``, by llama.cpp's
    memory for recurrent states, which keeps ``n_rewind`` copies of each.

    Each sequence has its own rows, which stand together. Sequences with different numbers of rows
    are decoded one after another. The later ones may move the states of the earlier ones without
    their copies, so that only the last sequence, and those before it with as many rows, can go
    back.
    """
    counts: dict[int, int] = {}
    for ids in rows.seq_ids:
        for seq_id in ids:
            counts[seq_id] = counts.get(seq_id, 0) + 1
    back: dict[int, int] = {}
    last = counts[rows.seq_ids[-1][0]]
    for seq_id, n in reversed(counts.items()):
        if n != last:
            break
        back[seq_id] = min(n - 1, n_rewind)
    return back


def n_sequences(tree: TokenTree) -> int:
    """Number of sequences ``tree_rows`` needs for ``tree``: 1 for a chain."""
    if tree.n_seq:
        return tree.n_seq
    return 1 if _is_one_chain(tree) else 1 + len(branch_ends(tree.parents, tree.branches))


def _is_one_chain(tree: TokenTree) -> bool:
    """True if depth equals node count and no branch is named."""
    return tree.depths[-1] == len(tree) - 1 and len(tree.branches) == 1


class SeqIds(Sequence[Sequence[int]]):
    """The seq_ids of every node, also as the arrays a ``llama_batch`` points into.

    counts    number of ids of each node, (n_nodes,)
    pointers  address of each node's first id, (n_nodes,); valid while this object lives
    """

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self._ids = ids
        self._moved: dict[int, SeqIds] = {}
        self.counts = np.array([len(seq_ids) for seq_ids in ids], np.int32)
        self._flat = np.array([seq_id for seq_ids in ids for seq_id in seq_ids], np.int32)
        ends = np.cumsum(self.counts)
        starts = (ends - self.counts).astype(np.uintp)
        self.pointers = np.uintp(self._flat.ctypes.data) + np.uintp(self._flat.itemsize) * starts

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return self._ids[i]

    def moved(self, first: int) -> SeqIds:
        """The same with ``first`` added to every id."""
        if first not in self._moved:
            ids = [tuple(first + seq_id for seq_id in seq_ids) for seq_ids in self._ids]
            self._moved[first] = SeqIds(ids)
        return self._moved[first]


@lru_cache(maxsize=256)  # shapes recur: lookahead's varies only with its number of n-grams
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
    """The last node of sequences 1, 2, …: branches named by drafters, then the other leaves."""
    named = list(branches[1:])
    known = {0, *parents, *named}
    return named + [node for node in range(len(parents)) if node not in known]
