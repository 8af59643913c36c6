"""Token tree -> rows of a batch: token, position, seq_ids, output. Pure.

Sequence 0 is the committed text; every other sequence is one branch of the tree. A node's seq_ids
are the branches that run through it. ``docs/batches.md`` draws the table for lookahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batching.errors import TreeTooWide
from batching.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a ``llama_batch``, as it is shown, tested and traced."""

    token: int
    position: int
    seq_ids: tuple[int, ...]
    output: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one batch as parallel lists, the form in which they reach the batch memory.

    Iterating gives ``Row`` objects. ``seq_ids[i]`` ascends.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    seq_ids: Sequence[Sequence[int]]
    outputs: Sequence[bool]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Row:
        return Row(self.tokens[i], self.positions[i], tuple(self.seq_ids[i]), bool(self.outputs[i]))

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


def tree_rows(tree: TokenTree, n_past: int, n_seq: int) -> Rows:
    """The rows of ``tree`` when ``n_past`` tokens are committed and ``n_seq`` sequences in use.

    The root joins every sequence, used by a branch or not: one that missed it would fall behind
    its last position and the next decode that names it would fail. For the same reason a tree that
    is one chain carries all sequences through: whatever is accepted is then in every sequence
    already, and nothing needs copying.

    Raises TreeTooWide when the tree has more branches than ``n_seq - 1``.
    """
    everyone = range(n_seq)
    n = len(tree)
    if n == 1:
        return Rows(tree.tokens, [n_past], [everyone], tree.outputs)
    positions = [n_past + depth for depth in tree.depths]
    parents = tree.parents
    if len(tree.branches) == 1 and parents == list(range(-1, n - 1)):
        return Rows(tree.tokens, positions, [everyone] * n, tree.outputs)

    seq_ids: list[Sequence[int]] = [[] for _ in range(n)]
    seq_id = 0
    for end in branch_ends(tree):
        seq_id += 1
        node = end
        while node:
            seq_ids[node].append(seq_id)  # type: ignore[attr-defined]
            node = parents[node]
    if seq_id >= n_seq:
        raise TreeTooWide(
            f"the tree has {seq_id} branches and needs {seq_id + 1} sequences, {n_seq} are in use; "
            f"lower the number of branches or guesses, or reserve more sequences"
        )
    seq_ids[0] = everyone
    return Rows(tree.tokens, positions, seq_ids, tree.outputs)


def branch_ends(tree: TokenTree) -> list[int]:
    """The nodes that end sequences 1, 2, …: branches named by drafters, then the other leaves."""
    named = tree.branches[1:]
    if not named:
        return [leaf for leaf in tree.leaves() if leaf]
    covered = set(named)
    return named + [leaf for leaf in tree.leaves() if leaf and leaf not in covered]
