"""Trees whose next level comes from the output of the level before, by whatever decodes it.

Draft models and autoregressive heads grow them alike: look at the likeliest tokens after some
nodes, decode the most promising of those, look again. ``grow`` lets the tree follow the draft's own
confidence, as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858); ``grow_static`` has its shape fixed
by ranks, as in EAGLE (Li et al. 2024, arXiv 2401.15077). Pure but for the decoding they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget
from speculation.heads.tree import Path


class Candidate(NamedTuple):
    """A draft token that may go into the tree.

    parent     index of the candidate above; -1 = the root
    prob       of the draft
    path_prob  product along the path from the root, however its factors were estimated
    q          what it was drawn from, (n_vocab,); None for the likeliest tokens
    """

    parent: int
    token: int
    prob: float
    path_prob: float
    q: Floats | None = None


class Scores(Protocol):
    """What a draft says of the tokens that follow each row it was given."""

    def logits(self, row: int) -> Floats:
        """Of every token that can be drafted, (n_drafted,), or what else the draft's Top reads."""
        ...


Candidates = Sequence[Candidate]
# Candidates so far, the one whose children are looked for (-1 = the root), its logits.
Children = Callable[[Candidates, int, Floats], list[Candidate]]
# The likeliest tokens after a row of logits, as many as wanted, and how likely each is.
Top = Callable[[Floats, int], list[tuple[int, float]]]
# Decode tokens below nodes of the level before, given by their places in it.
Level = Callable[[Sequence[int], Sequence[int]], Scores]


def grow(
    children: Children, level: Level, output: Scores, row: int, *, depth: int, width: int
) -> list[Candidate]:
    """Candidates level by level, ``depth`` levels at most; parents come before their children.

    Of each level the ``width`` likeliest paths are decoded, and only where that can have another
    level below. ``output`` holds the root's logits in ``row``.
    """
    nodes: list[Candidate] = []
    frontier = [-1]  # candidates whose children are looked for; their rows are row, row + 1, …
    for above in range(depth):
        first = len(nodes)
        found: list[Candidate] = []
        for i, parent in enumerate(frontier):
            found += children(nodes, parent, output.logits(row + i))
        nodes += found
        if not found or above + 1 == depth:
            break
        # A level is no broader than its sequences: the likeliest paths go on.
        order = sorted(range(first, len(nodes)), key=lambda c: -nodes[c].path_prob)
        chosen = sorted(order[:width])
        place = {candidate: i for i, candidate in enumerate(frontier)}
        output = level([place[nodes[c].parent] for c in chosen], [nodes[c].token for c in chosen])
        row, frontier = 0, chosen
    return nodes


def grow_static(
    shape: Sequence[Path], top: Top, level: Level, output: Scores, row: int
) -> list[Candidate]:
    """The candidates of a tree fixed by ranks; ``shape`` has parents first, siblings by rank."""
    nodes: list[Candidate] = []
    index: dict[Path, int] = {(): -1}
    inner = {path[:-1] for path in shape}
    frontier: list[Path] = [()]
    while frontier:
        below: list[Path] = []
        for i, path in enumerate(frontier):
            ranks = [longer[-1] for longer in shape if longer[:-1] == path]
            found = top(output.logits(row + i), max(ranks) + 1)
            reached = nodes[index[path]].path_prob if path else 1.0
            for rank in ranks:
                if rank < len(found):
                    child = (*path, rank)
                    token, prob = found[rank]
                    index[child] = len(nodes)
                    nodes.append(Candidate(index[path], token, prob, reached * prob))
                    if child in inner:
                        below.append(child)
        if below:
            place = {path: i for i, path in enumerate(frontier)}
            output = level(
                [place[path[:-1]] for path in below], [nodes[index[path]].token for path in below]
            )
        row, frontier = 0, below
    return nodes


def best_nodes(nodes: Candidates, most: int) -> list[int]:
    """Indexes of the ``most`` likeliest candidates, ascending: a tree, and none expects more.

    EAGLE-2's reranking. No child is likelier than its parent, and of equals the one found first,
    which is the parent, is taken first; so whoever is taken has its parent taken.
    """
    order = sorted(range(len(nodes)), key=lambda c: -nodes[c].path_prob)
    return sorted(order[:most])


def depths_of(nodes: Candidates) -> list[int]:
    """How deep each candidate is below the root, whose children are at 1."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
    return depths


def top_beams(nodes: Candidates, most: int) -> list[int]:
    """Indexes of the ``most`` likeliest of the deepest candidates and all above them, ascending.

    What beam search of that width ends with, paths that begin alike being one.
    """
    depths = depths_of(nodes)
    deepest = [c for c in range(len(nodes)) if depths[c] == max(depths)]
    kept: set[int] = set()
    for c in sorted(deepest, key=lambda c: -nodes[c].path_prob)[:most]:
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
    """Add the chosen candidates to ``tree``; tree node by candidate, with -1 for the root.

    ``prob`` is how likely one is to hold below its parent, by default as its path says.
    """
    placed = {-1: 0}
    for c in chosen:
        candidate = nodes[c]
        if candidate.parent not in placed or budget.room(tree) <= 0:
            continue
        reached = 1.0 if candidate.parent < 0 else nodes[candidate.parent].path_prob
        if prob is not None:
            holds = prob(candidate)
        else:
            holds = candidate.path_prob / reached if reached else 0.0
        placed[c] = tree.add(
            placed[candidate.parent],
            candidate.token,
            merge=candidate.q is None,
            prob=holds,
            draft_probs=candidate.q,
        )
    return placed


def below(
    top: Top,
    width: int,
    floor: float,
    holds: Callable[[Candidate], float],
    *,
    p_min: float = 0.0,
) -> Children:
    """The ``width`` likeliest tokens below a candidate, for a draft whose word ``holds`` judges.

    With a floor it matters how likely a path is: as likely as ``holds`` says, and no path below the
    floor is looked at. Without one it only matters which is likelier, and the draft says that; it
    drafts nothing that it gives less than ``p_min`` itself.
    """

    def children(nodes: Candidates, parent: int, logits: Floats) -> list[Candidate]:
        reached = 1.0 if parent < 0 else nodes[parent].path_prob
        found = []
        for token, prob in top(logits, width):
            if prob < p_min and not floor:
                break
            candidate = Candidate(parent, token, prob, reached * prob)
            if floor:
                candidate = candidate._replace(path_prob=reached * holds(candidate))
            if candidate.path_prob >= floor:
                found.append(candidate)
        return found

    return children


def named(top: Top, tokens: npt.NDArray[np.int32] | None) -> Top:
    """``top`` for logits of some ``tokens`` only, (n_drafted,), or of all: by the target's ids."""
    if tokens is None:
        return top
    return lambda logits, n: [(int(tokens[token]), prob) for token, prob in top(logits, n)]


def likeliest(logits: Floats, k: int) -> list[tuple[int, float]]:
    """The ``k`` likeliest tokens and their probabilities, the likeliest first."""
    peak = logits.max()
    total = float(np.exp(logits - peak).sum())
    if k == 1:
        return [(int(logits.argmax()), 1.0 / total)]
    k = min(k, len(logits))
    top = np.argpartition(logits, -k)[-k:]
    top = top[logits[top].argsort()[::-1]]
    weights = np.exp(logits[top] - peak) / total
    return list(zip(top.tolist(), weights.tolist(), strict=True))
