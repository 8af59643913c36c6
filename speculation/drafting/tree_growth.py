"""Grows draft trees, best paths first, or level by level with a decode of the draft for each.

Level by level: take the likeliest tokens after each node of a level, decode the most promising of
them, repeat, as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858). ``TreeDrafter`` is the base of the
methods that do so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batching.errors import CacheFull
from batching.logits import highest
from batching.together import Coroutine, own_time
from batching.tree import Floats, TokenTree
from speculation.average import Average
from speculation.drafter import DraftBudget, Drafter, Step
from speculation.drafting.acceptance import RATE, Acceptance, of_probability
from speculation.drafting.resources import Resources


class Scores(Protocol):
    """A draft's scores for the token after each row of a level."""

    def logits(self, row: int) -> Floats:
        """Scores in the form the draft's ``Top`` takes: usually logits, (n_drafted,)."""
        ...


# (logits, k) -> the k likeliest tokens with their probabilities
Top = Callable[[Floats, int], Sequence[tuple[int, float]]]
# (parents as indexes into the previous level, tokens) -> scores of the decoded level
Level = Callable[[Sequence[int], Sequence[int]], Coroutine[Scores]]


def grow_best_first(
    tree: TokenTree,
    successors: Callable[[int], Sequence[tuple[int, float]]],
    n_nodes: int,
    floor: float = 0.0,
) -> None:
    """Add up to ``n_nodes`` drafts, always the one with the likeliest path, which is ``floor`` at
    least.

    ``successors`` has the tokens that may follow a node, with their acceptance probabilities,
    likeliest first.
    """
    # Of each node only the likeliest successor that is left, by its path probability; ages break
    # ties: (-path_prob, age, parent, successors, index, the parent's path probability).
    heap: list[tuple[float, int, int, Sequence[tuple[int, float]], int, float]] = []
    ages = count()

    def push(
        parent: int, siblings: Sequence[tuple[int, float]], i: int, parent_prob: float
    ) -> None:
        if i < len(siblings) and (path_prob := parent_prob * siblings[i][1]) >= floor:
            heapq.heappush(heap, (-path_prob, next(ages), parent, siblings, i, parent_prob))

    push(0, successors(0), 0, 1.0)
    while heap and n_nodes > 0:
        negative, _, parent, siblings, i, parent_prob = heapq.heappop(heap)
        push(parent, siblings, i + 1, parent_prob)
        token, prob = siblings[i]
        node = tree.add(parent, token, prob=prob)
        push(node, successors(node), 0, -negative)
        n_nodes -= 1


class Growth:
    """The growth of a tree: all candidates at first, of which some are drafted.

    tree        the candidates, siblings from the likeliest; its ``probs`` are calibrated
    given       by node, the probability that the draft gave it
    path_probs  by node, the path probability by which nodes are chosen
    """

    def __init__(self, token: int, acceptance: Acceptance, floor: float = 0.0) -> None:
        """``token`` is the root. With a ``floor``, path probabilities are calibrated by
        ``acceptance``, and none is below it. Without one only their order matters, so they are
        the draft's own."""
        self.tree, self.floor = TokenTree(token), floor
        self.given, self.path_probs = [1.0], [1.0]
        self._acceptance = acceptance

    def add(self, parent: int, token: int, prob: float, q: Floats | None = None) -> bool:
        """Add a candidate to which the draft gave ``prob``, unless its path is too unlikely.

        ``q`` is the distribution it was sampled from, (n_vocab,).
        """
        accepted = self._acceptance.prob(of_probability(prob))
        path_prob = self.path_probs[parent] * (accepted if self.floor else prob)
        if path_prob < self.floor:
            return False
        self.tree.add(parent, token, merge=False, prob=accepted, draft_probs=q)
        self.given.append(prob)
        self.path_probs.append(path_prob)
        return True

    def add_likely(
        self,
        parent: int,
        likeliest: Sequence[tuple[int, float]],
        p_min: float = 0.0,
        p_split: float | None = None,
    ) -> None:
        """Add those of the ``likeliest`` tokens below a node that have ``p_min``; after the first,
        ``p_split``."""
        needed = p_min
        for token, prob in likeliest:
            if prob >= needed and self.add(parent, token, prob) and p_split is not None:
                needed = p_split

    def levels(
        self,
        add_below: Callable[[int, Floats], object],
        level: Level,
        output: Scores,
        row: int,
        *,
        depth: int,
        width: int,
        expands: Callable[[int], bool] = lambda node: True,
    ) -> Coroutine[None]:
        """Grow up to ``depth`` levels; parents come before their children.

        ``add_below`` adds the candidates below a node, from the scores after it. Decodes the
        ``width`` likeliest paths of each level except the last, among nodes that it ``expands``.
        The root's scores are in ``row`` of ``output``.
        """
        tree = self.tree
        frontier = [0]  # nodes to expand; their output rows are row, row + 1, …
        for above in range(depth):
            first = len(tree)
            for i, node in enumerate(frontier):
                add_below(node, output.logits(row + i))
            # The width of a level is limited by the context's sequences.
            open_nodes = list(filter(expands, range(first, len(tree))))
            chosen = sorted(self._by_path(open_nodes)[:width])
            if not chosen or above + 1 == depth:
                return
            parents = [frontier.index(tree.parents[node]) for node in chosen]
            output = yield from level(parents, [tree.tokens[node] for node in chosen])
            row, frontier = 0, chosen

    def _by_path(self, nodes: Sequence[int]) -> list[int]:
        return sorted(nodes, key=lambda node: -self.path_probs[node])

    def likeliest(self, limit: int) -> list[int]:
        """The ``limit`` likeliest candidates, ascending: the best tree of that size.

        EAGLE-2's reranking. No child is likelier than its parent, and the sort is stable, so every
        chosen node's parent is chosen, too.
        """
        return sorted(self._by_path(range(1, len(self.tree)))[: max(0, limit)])

    def beams(self, width: int) -> list[int]:
        """The ``width`` likeliest of the deepest candidates and their ancestors, ascending.

        The result of a beam search of that width, with common prefixes merged.
        """
        depths = self.tree.depths
        deepest = [node for node in range(1, len(depths)) if depths[node] == max(depths)]
        ends = self._by_path(deepest)[:width]
        return sorted({node for end in ends for node in self.tree.path_to(end)[1:]})


class LevelTime:
    """The average time of a tree level, and the path probability at which one more pays off."""

    def __init__(self, resources: Resources, share: float = 0.5) -> None:
        """A level counts as ``share`` of that until one was timed. With too low a share, the first
        draft is so long that a slow source looks hopeless.
        """
        self._resources, self._share = resources, share
        self.seconds = Average(RATE)

    @classmethod
    def of(cls, name: str, resources: Resources, share: float = 0.5) -> LevelTime:
        """The one of a method, kept from text to text."""
        return resources.keep(f"{name} level time", lambda: cls(resources, share))

    def min_path_prob(self) -> float:
        """The path probability that pays for a level's time, without its row."""
        seconds = self.seconds.value
        return seconds / self._resources.cost.curve(0).at(1) if seconds else self._share


class TreeDrafter(Drafter):
    """Base of drafters whose model or head yields a tree of candidates below the last token.

    Calibrates its probabilities and weighs drafting time. Subclasses implement ``_grow``.
    """

    def __init__(
        self, acceptance: Acceptance | None = None, level_time: LevelTime | None = None
    ) -> None:
        """With ``level_time``, and if the budget has a minimum path probability, drafting stops
        when it is no longer worth its time."""
        self._acceptance = acceptance or Acceptance()
        self._time = level_time
        self._began = 0.0  # to grow a tree, once its root is decoded
        self._growth: Growth | None = None  # of this step

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        floor = budget.min_path_prob
        if floor and self._time is not None:
            floor += self._time.min_path_prob()
        self._growth = growth = Growth(tokens[-1], self._acceptance, floor)
        grown, budget = growth.tree, budget._replace(max_nodes=budget.room(tree))
        self._began = own_time.now()
        try:
            chosen = yield from self._grow(growth, tokens, budget)
        except CacheFull:  # other texts have its cells
            chosen = ()
        if chosen and self._time is not None:
            self._time.seconds.add((own_time.now() - self._began) / max(grown.depths))
        placed = {0: 0}  # the tree may have the drafts of a grammar
        for node in chosen[: max(0, budget.max_nodes)]:
            q = grown.draft_probs.get(node)
            placed[node] = tree.add(
                placed[grown.parents[node]],
                grown.tokens[node],
                merge=q is None,
                prob=grown.probs[node],
                draft_probs=q,
            )

    def _grow(
        self, growth: Growth, tokens: Sequence[int], budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        """Grow all candidates after ``tokens``; return those to draft, ascending.

        None of them if it cannot draft: no state yet, or its context is full.
        """
        raise NotImplementedError

    def observe(self, step: Step) -> None:
        """Compare the first choices with the step's tokens.

        Candidates that were not decoded count, too: the text shows whether they were right.
        """
        growth, self._growth = self._growth, None
        if growth is None:
            return
        tree, node = growth.tree, 0
        for token in step.tokens:
            below = [child for child, parent in enumerate(tree.parents) if parent == node]
            if not below:
                break
            cell = of_probability(growth.given[below[0]])
            self._acceptance.learn(cell, accepted=tree.tokens[below[0]] == token)
            node = next((child for child in below if tree.tokens[child] == token), -2)


def with_target_ids(top: Top, tokens: npt.NDArray[np.int32] | None) -> Top:
    """Make ``top`` return the target's token ids.

    ``tokens`` maps a reduced draft vocabulary to target ids, (n_drafted,); None = same ids.
    """
    if tokens is None:
        return top
    return lambda logits, n: [(int(tokens[token]), prob) for token, prob in top(logits, n)]


def top_tokens(logits: Floats, k: int) -> list[tuple[int, float]]:
    """The ``k`` likeliest tokens with their probabilities, likeliest first; fewer, if the others
    cannot follow."""
    peak = logits.max()
    total = float(np.exp(logits - peak).sum())
    if k == 1:
        return [(int(logits.argmax()), 1.0 / total)]
    tokens, values = highest(logits, k)
    if len(tokens) < k:
        tokens, values = highest(logits, k, math.inf)
    order = values.argsort()[::-1]
    weights = np.exp(values[order] - peak) / total
    return list(zip(tokens[order].tolist(), weights.tolist(), strict=True))
