"""Turns a token tree into batch rows: token, position, seq_ids, output. Pure.

Sequence 0 is the committed text; every other sequence is one branch of the tree. A node's seq_ids
are the branches that run through it, which have consecutive numbers. ``docs/batches.md`` draws
lookahead's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batching.errors import TreeError
from batching.tree import Floats, TokenTree


@dataclass(slots=True)  # not frozen: that would cost a microsecond per step
class Rows:
    """The rows of one batch as parallel lists, ready to be packed into the batch memory.

    ``embeddings``, (n, n_embd), replace the token embeddings at the first layer. ``n_before`` rows
    precede those of the tree, from whose first row a slot counts.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    seq_ids: Sequence[range]
    outputs: Sequence[bool]
    embeddings: Floats | None = None
    n_before: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


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

    Raises TreeError if the tree has more than ``n_seq - 1`` branches.
    """
    n = len(tree)
    if n == 1:
        return Rows(tree.tokens, [n_past], [range(n_seq)], tree.outputs)
    if _is_one_chain(tree):
        return Rows(tree.tokens, range(n_past, n_past + n), [range(n_seq)] * n, tree.outputs)
    positions = [n_past + depth for depth in tree.depths]
    return Rows(tree.tokens, positions, _seq_ids(tree, n_seq), tree.outputs)


def pack(parts: Sequence[tuple[Rows, int]]) -> tuple[Rows, list[int]]:
    """The rows of several texts as one batch, and for each text the row of its tree's root.

    A part is a text's rows and the first of its sequences, which becomes its sequence 0. All rows
    have embeddings, or none.
    """
    if len(parts) == 1:
        ((rows, first),) = parts
        if not first:
            return rows, [rows.n_before]
    tokens: list[int] = []
    positions: list[int] = []
    seq_ids: list[range] = []
    outputs: list[bool] = []
    starts = []
    for rows, first in parts:
        starts.append(len(tokens) + rows.n_before)
        tokens += rows.tokens
        positions += rows.positions
        outputs += rows.outputs
        ids = rows.seq_ids
        if ids[-1] is ids[0]:  # a prompt, a chain or a lone root: one range for all
            seq_ids += [range(first + ids[0].start, first + ids[0].stop)] * len(ids)
        else:
            seq_ids += [range(first + some.start, first + some.stop) for some in ids]
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
    if _is_one_chain(tree):
        return 1
    n_leaves = len(tree) - len(set(tree.parents) - {-1})
    return 1 + n_leaves


def _is_one_chain(tree: TokenTree) -> bool:
    """True if depth equals node count and no branch needs a certain number."""
    return tree.depths[-1] == len(tree) - 1 and not tree.branches


def _seq_ids(tree: TokenTree, n_seq: int) -> list[range]:
    """For each node, the numbers of the leaves below it."""
    parents, n = tree.parents, len(tree)
    n_leaves = [0] * n
    for node in range(n - 1, 0, -1):
        n_leaves[node] = n_leaves[node] or 1
        n_leaves[parents[node]] += n_leaves[node]
    if n_leaves[0] >= n_seq:
        raise TreeError(
            f"the tree has {n_leaves[0]} branches and needs {n_leaves[0] + 1} sequences, {n_seq} "
            f"are in use; lower the number of branches or guesses, or reserve more sequences"
        )
    nodes: Iterable[int] = range(1, n)
    if tree.branches:
        paths = [node for end in tree.branches for node in tree.path_to(end)[1:]]
        nodes = dict.fromkeys([*paths, *nodes])
    seq_ids = [range(n_seq)] * n
    free = [1] * n  # the number of the next leaf below each node
    for node in nodes:
        first = free[node] = free[parents[node]]
        free[parents[node]] += n_leaves[node]
        seq_ids[node] = range(first, free[parents[node]])
    return seq_ids
