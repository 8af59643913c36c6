"""Confidence: how far a head's own probabilities are to be believed, and what they must reach."""

from __future__ import annotations

from collections.abc import Callable

from speculation.drafter import DraftBudget, Step
from speculation.drafting.estimates import Estimates
from speculation.drafting.tree_growth import Candidate, Candidates, depths_of

_TIME_RATE = 0.1  # of the average time of a level
# How often a head's first choice is the target's, by its probability in tenths; set by judgement.
PRIORS = (0.06, 0.14, 0.24, 0.34, 0.43, 0.52, 0.60, 0.68, 0.77, 0.92)


class Confidence:
    """Counts, by tenths of the probability, how often the first choice after a path held."""

    def __init__(self, estimates: Estimates | None = None) -> None:
        """``estimates`` may be shared with the texts before."""
        self.estimates = estimates or Estimates(PRIORS)
        self._nodes: Candidates = ()

    def holds(self, candidate: Candidate) -> float:
        """How likely a candidate is to hold where its parent does."""
        return self.estimates.of(_tenth(candidate.prob))

    def note(self, nodes: Candidates) -> None:
        """These are the candidates of this step, siblings in the order of their probability."""
        self._nodes = nodes

    def learn(self, step: Step) -> None:
        """Compare the candidates with the tokens that came, and forget them.

        Whether they were decoded does not matter: what would have held is known all the same.
        """
        below: dict[int, list[int]] = {}
        for c, node in enumerate(self._nodes):
            below.setdefault(node.parent, []).append(c)
        at = -1
        for token in step.tokens:
            if at not in below:
                break
            first = self._nodes[below[at][0]]
            self.estimates.learn(_tenth(first.prob), accepted=first.token == token)
            same = [c for c in below[at] if self._nodes[c].token == token]
            if not same:
                break
            at = same[0]
        self._nodes = ()


class LevelTime:
    """What a level of a head's tree takes, and so how likely a path must be to get another."""

    def __init__(self, target_seconds: Callable[[], float] | None = None) -> None:
        """``target_seconds`` is what a step of the target costs, if that is to be weighed."""
        self._target_seconds = target_seconds
        self._seconds = 0.0  # of a level, on average

    def least_path_prob(self, budget: DraftBudget) -> float:
        """Path probability below which another level is not worth its row and its own time."""
        if not budget.min_path_prob or self._target_seconds is None:
            return budget.min_path_prob
        return budget.min_path_prob + self._seconds / self._target_seconds()

    def took(self, seconds: float, nodes: Candidates) -> None:
        """Looking for ``nodes`` took so long, the root's level included."""
        n_levels = 1 + max(depths_of(nodes), default=0)
        self._seconds += _TIME_RATE * (seconds / n_levels - self._seconds)


def _tenth(prob: float) -> int:
    return min(9, int(10 * prob))
