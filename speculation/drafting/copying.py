"""CopyDrafter: drafts that are copied from where the same tokens were written before.

A method finds the place to copy from. How many tokens are copied follows from how likely they are
to be accepted, which grows with the match before them and is learnt from every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from batching.cache import common_prefix
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Step
from speculation.drafting.acceptance import N_STRENGTHS, Acceptance, of_length
from speculation.drafting.suffix_index import LONGEST_CONTEXT, LONGEST_COPY
from speculation.system.params import Params, param

P_MIN = 0.55  # minimum path probability of a draft if nobody selects afterwards
DRAFT_MAX = 63


@dataclass(frozen=True)
class CopyParams(Params):
    """How much is copied."""

    draft_max: int = param(
        DRAFT_MAX,
        "most tokens in a draft, whose length is 1, 3, 7, 15, … up to this",
        (1, LONGEST_COPY),
    )
    p_min: float = param(
        P_MIN, "minimum path probability of a draft; auto decides by cost instead", (0.0, 1.0)
    )


def along(kind: int) -> list[int]:
    """The cells (see ``Acceptance``) of a copy's tokens, by the length of the match before each.

    The match grows with the copy: after a match of 3 tokens, the cells are those from 3 on.
    """
    lengths = range(LONGEST_CONTEXT + LONGEST_COPY + 1)
    return [N_STRENGTHS * kind + of_length(length) for length in lengths]


class Branch(NamedTuple):
    """Another continuation, equal to the copy up to ``depth``; ``cells`` are of its own tokens."""

    depth: int
    tokens: list[int]
    cells: list[int]


class Copy(NamedTuple):
    """Tokens to copy, the cells of their acceptance, and other continuations by depth."""

    tokens: list[int]
    cells: list[int]
    branches: Sequence[Branch] = ()


class CopyDrafter(Drafter):
    """Drafts a copy as long as it is likely to be accepted.

    A method overrides ``_start``, ``_read``, ``_find`` and ``_foresee``.
    """

    def __init__(self, acceptance: Acceptance, p_min: float = P_MIN) -> None:
        """A draft's path probability is at least ``p_min``, or the budget's if that has one."""
        self._acceptance = acceptance
        self._p_min = p_min
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        self._copy: Copy | None = None  # of this step
        self._foreseen: tuple[int, int] | None = None  # the next token, if not drafted; its cell
        self._n_read = len(prompt)  # tokens of the text
        self._start(prompt)

    def _start(self, prompt: Sequence[int]) -> None:
        """Read the prompt, instead of an earlier text."""
        raise NotImplementedError

    def _read(self, tokens: Sequence[int], n_new: int) -> None:
        """Read the new ones of ``tokens``, the whole text."""
        raise NotImplementedError

    def _find(self) -> Copy | None:
        """What to copy after what was read; None = nothing."""
        raise NotImplementedError

    def _foresee(self) -> tuple[int, int] | None:
        """The next token and the cell of its acceptance, without comparing all there is."""
        raise NotImplementedError

    def _follow(self, tokens: Sequence[int]) -> None:
        """Read ``tokens``, and learn if they went on as foreseen where nothing was drafted."""
        if n_new := len(tokens) - self._n_read:
            if self._foreseen is not None:
                token, cell = self._foreseen
                self._acceptance.learn(cell, accepted=token == tokens[self._n_read])
            self._read(tokens, n_new)
            self._n_read = len(tokens)
        self._foreseen = None

    def promise(self, tokens: Sequence[int]) -> float:
        self._follow(tokens)
        self._foreseen = foreseen = self._foresee()
        return 0.0 if foreseen is None else self._acceptance.prob(foreseen[1])

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._follow(tokens)
        self._copy = copy = self._find()
        if copy is None:
            return
        n = min(len(copy.tokens), budget.room(tree), budget.max_depth)
        floor = budget.min_path_prob or self._p_min
        probs = self._acceptance.chain_probs(copy.cells[:n], floor)
        if not budget.min_path_prob:
            del probs[round_length(len(probs)) :]
        if not probs:
            return
        drafted = copy.tokens[: len(probs)]
        tree.add_chain(0, drafted, probs)
        if copy.branches and not budget.chain_only:
            self._add_branches(copy.branches, probs, [0, *tree.follow(0, drafted)], tree, budget)

    def _add_branches(
        self,
        branches: Sequence[Branch],
        probs: list[float],
        path: list[int],
        tree: TokenTree,
        budget: DraftBudget,
    ) -> None:
        """Add branches to the copy, whose tokens have ``probs`` and are the nodes of ``path``."""
        floor = budget.min_path_prob or self._p_min
        depth, left = -1, 0.0  # probability that no sibling before is accepted
        for branch in branches:
            if branch.depth >= len(probs):
                return
            if branch.depth != depth:
                depth = branch.depth
                left = 1.0 - probs[depth]
            n = min(len(branch.tokens), budget.max_depth - depth, budget.room(tree))
            before = left * prod(probs[:depth])
            added = self._acceptance.chain_probs(branch.cells[: max(0, n)], floor, before)
            if added:
                added[0] *= left
                left -= added[0]
                tree.add_chain(path[depth], branch.tokens[: len(added)], added)

    def observe(self, step: Step) -> None:
        """Learn from the step's tokens, drafted or not."""
        copy, actual, acceptance = self._copy, step.tokens, self._acceptance
        if copy is None:
            return
        self._copy = None
        n = min(len(actual), len(copy.tokens))
        same = copy.tokens[:n] == actual[:n]  # mostly, and faster
        n_accepted = n if same else common_prefix(copy.tokens, actual)
        acceptance.learn_chain(copy.cells, n_accepted, failed=n_accepted < n)
        for branch in copy.branches:
            if branch.depth == n_accepted < n:
                is_right = branch.tokens[0] == actual[n_accepted]
                acceptance.learn(branch.cells[0], accepted=is_right)
                if is_right:
                    break


def round_length(length: int) -> int:
    """Round down to 1, 3, 7, 15, …: with the root, a power of two rows.

    llama.cpp reuses its compute graph between batches of the same size; a change costs as much as
    one or two rows.
    """
    return (1 << (length + 1).bit_length() - 1) - 1
