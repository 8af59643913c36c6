"""Grows draft trees, best paths first, or level by level with a decode of the draft for each.

Level by level: take the likeliest tokens after each node of a level, decode the most promising of
them, repeat, as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858). Pure except for the decode function
passed in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from batching.logits import highest
from batching.together import Coroutine
from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget


class Candidate(NamedTuple):
    """A candidate draft token.

    parent     index of the parent candidate; -1 = the root
    prob       probability given by the draft
    path_prob  path probability, from either the draft's or calibrated probabilities
    q          the distribution it was sampled from, (n_vocab,); None if it was not sampled
    """

    parent: int
    token: int
    prob: float
    path_prob: float
    q: Floats | None = None


class Scores(Protocol):
    """A draft's scores for the token after each row of a level."""

    def logits(self, row: int) -> Floats:
        """Scores in the form the draft's ``Top`` takes: usually logits, (n_drafted,)."""
        ...


Candidates = Sequence[Candidate]
# (candidates so far, parent, the parent's logits) -> children; parent -1 = the root
Children = Callable[[Candidates, int, Floats], list[Candidate]]
# (logits, k) -> the k likeliest tokens with their probabilities
Top = Callable[[Floats, int], list[tuple[int, float]]]
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


def grow(
    children: Children,
    level: Level,
    output: Scores,
    row: int,
    *,
    depth: int,
    width: int,
    expands: Callable[[int], bool] = lambda candidate: True,
) -> Coroutine[list[Candidate]]:
    """Grow up to ``depth`` levels of candidates; parents come before their children.

    Decodes the ``width`` likeliest paths of each level except the last, among candidates that
    ``expands``. The root's logits are in ``row`` of ``output``.
    """
    nodes: list[Candidate] = []
    frontier = [-1]  # candidates to expand; their output rows are row, row + 1, …
    for above in range(depth):
        first = len(nodes)
        new_nodes: list[Candidate] = []
        for i, parent in enumerate(frontier):
            new_nodes += children(nodes, parent, output.logits(row + i))
        nodes += new_nodes
        # The width of a level is limited by the context's sequences.
        open_nodes = filter(expands, range(first, len(nodes)))
        chosen = sorted(sorted(open_nodes, key=lambda c: -nodes[c].path_prob)[:width])
        if not chosen or above + 1 == depth:
            break
        index = {candidate: i for i, candidate in enumerate(frontier)}
        parents, tokens = [index[nodes[c].parent] for c in chosen], [nodes[c].token for c in chosen]
        output = yield from level(parents, tokens)
        row, frontier = 0, chosen
    return nodes


def best_nodes(nodes: Candidates, limit: int) -> list[int]:
    """Indexes of the ``limit`` likeliest candidates, ascending: the best tree of that size.

    EAGLE-2's reranking. No child is likelier than its parent, and the sort is stable, so every
    chosen node's parent is chosen, too.
    """
    order = sorted(range(len(nodes)), key=lambda c: -nodes[c].path_prob)
    return sorted(order[:limit])


def depths_of(nodes: Candidates) -> list[int]:
    """Depth of each candidate; the root's children have depth 1."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
    return depths


def top_beams(nodes: Candidates, width: int) -> list[int]:
    """Indexes of the ``width`` likeliest of the deepest candidates and their ancestors, ascending.

    The result of a beam search of that width, with common prefixes merged.
    """
    depths = depths_of(nodes)
    deepest = [c for c in range(len(nodes)) if depths[c] == max(depths)]
    kept: set[int] = set()
    for c in sorted(deepest, key=lambda c: -nodes[c].path_prob)[:width]:
        while c >= 0:
            kept.add(c)
            c = nodes[c].parent
    return sorted(kept)


def add_to_tree(
    nodes: Candidates,
    chosen: Sequence[int],
    tree: TokenTree,
    budget: DraftBudget,
    prob: Callable[[Candidate], float] | None = None,
) -> dict[int, int]:
    """Add the chosen candidates to ``tree``; return candidate -> tree node, with -1 for the root.

    ``prob`` is a candidate's acceptance probability given its parent; by default it follows from
    the path probabilities.
    """
    placed = {-1: 0}
    for c in chosen:
        candidate = nodes[c]
        if candidate.parent not in placed or budget.room(tree) <= 0:
            continue
        if prob is not None:
            node_prob = prob(candidate)
        else:
            parent_prob = 1.0 if candidate.parent < 0 else nodes[candidate.parent].path_prob
            node_prob = candidate.path_prob / parent_prob if parent_prob else 0.0
        placed[c] = tree.add(
            placed[candidate.parent],
            candidate.token,
            merge=candidate.q is None,
            prob=node_prob,
            draft_probs=candidate.q,
        )
    return placed


def top_children(
    top: Top,
    width: int,
    floor: float,
    acceptance_prob: Callable[[Candidate], float],
    *,
    p_min: float = 0.0,
) -> Children:
    """Children = the ``width`` likeliest tokens below a candidate.

    With a ``floor``, path probabilities are calibrated by ``acceptance_prob``, and paths below the
    floor are dropped. Without one only their order matters, so the draft's own probabilities
    are used, and tokens below ``p_min`` are dropped.
    """

    def children(nodes: Candidates, parent: int, logits: Floats) -> list[Candidate]:
        parent_prob = 1.0 if parent < 0 else nodes[parent].path_prob
        candidates = []
        for token, prob in top(logits, width):
            if prob < p_min and not floor:
                break
            candidate = Candidate(parent, token, prob, parent_prob * prob)
            if floor:
                path_prob = parent_prob * acceptance_prob(candidate)
                candidate = candidate._replace(path_prob=path_prob)
            if candidate.path_prob >= floor:
                candidates.append(candidate)
        return candidates

    return children


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
