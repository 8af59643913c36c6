"""Confidence: how far the probabilities that a head gives its own drafts are to be believed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from batching.tree import TokenTree
from speculation.estimates import Estimates
from speculation.growth import Candidate, Candidates

# How often a head's first choice is the target's, by its probability in tenths; set by judgement.
PRIORS = (0.06, 0.14, 0.24, 0.34, 0.43, 0.52, 0.60, 0.68, 0.77, 0.92)


class Confidence:
    """Counts, by tenths of the probability, how often the first choice below a node held."""

    def __init__(self, estimates: Estimates | None = None) -> None:
        """``estimates`` may be shared with the texts before."""
        self.estimates = estimates or Estimates(PRIORS)
        self._choices: dict[int, tuple[int, float]] = {}  # first choice below each tree node

    def holds(self, candidate: Candidate) -> float:
        """How likely a candidate is to hold where its parent does."""
        return self.estimates.of(_tenth(candidate.prob))

    def note(self, nodes: Candidates, chosen: Iterable[int], placed: Mapping[int, int]) -> None:
        """These candidates went into the tree: tree node by candidate, -1 being the root.

        Siblings come in the order of their probability.
        """
        for c in chosen:
            if nodes[c].parent in placed:
                self._choices.setdefault(placed[nodes[c].parent], (nodes[c].token, nodes[c].prob))

    def learn(self, tree: TokenTree, path: Sequence[int], bonus: int) -> None:
        """Compare what was noted with what came, and forget it."""
        became = [*(tree.tokens[node] for node in path[1:]), bonus]
        for node, actual in zip(path, became, strict=True):
            if node in self._choices:
                token, prob = self._choices[node]
                self.estimates.learn(_tenth(prob), held=token == actual)
        self._choices.clear()

    def forget(self) -> None:
        """What was noted is not decoded after all."""
        self._choices.clear()


def _tenth(prob: float) -> int:
    return min(9, int(10 * prob))
