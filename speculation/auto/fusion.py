"""Combines the trees of several sources into one. Pure.

Each source gives the tokens after a node probabilities of its own. Taken as independent evidence,
they are multiplied: a token that two sources agree on gains, and where they disagree the surer one
wins. A source's remaining probability is shared by the tokens that it does not draft.
"""

from __future__ import annotations

from batching.tree import TokenTree

# Share of a source's remaining probability that a token drafted by another source gets. Replayed,
# 0.15 and 0.5 differ by 0.2%.
_SHARE = 0.3


def fuse(tree: TokenTree, other: TokenTree) -> list[int]:
    """Add ``other`` to ``tree``, both below the same root; return the nodes of its drafts."""
    placed = [0]
    for node in range(1, len(other)):
        placed.append(tree.add(placed[other.parents[node]], other.tokens[node], prob=0.0))
    for parent, children in other.drafts().items():
        known = [n for n in range(1, len(tree)) if tree.parents[n] == placed[parent]]
        _update(tree, known, {placed[child]: other.probs[child] for child in children})
    return placed[1:]


def _update(tree: TokenTree, siblings: list[int], probs: dict[int, float]) -> None:
    """Multiply the siblings' probabilities with those of another source and normalise them.

    ``probs`` has the other source's; a sibling that only it drafts has probability 0 so far.
    """
    rest = max(0.0, 1.0 - sum(tree.probs[node] for node in siblings))
    if rest == 1.0:  # a place that only the other source has reached
        for node, prob in probs.items():
            tree.probs[node] = prob
        return
    left = max(0.0, 1.0 - sum(probs.values()))
    scores = {
        node: (tree.probs[node] or rest * _SHARE) * probs.get(node, left * _SHARE)
        for node in siblings
    }
    total = sum(scores.values()) + rest * left
    for node, score in scores.items():
        tree.probs[node] = score / total if total else 0.0
