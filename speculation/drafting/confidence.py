"""Calibrates a drafting head's probabilities, and derives the minimum path probability."""

from __future__ import annotations

from collections.abc import Callable

from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import RATE, Acceptance, of_probability
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import Candidate, Candidates, depths_of


class Confidence:
    """Calibrated confidence: the acceptance rate of first choices, by their probability."""

    def __init__(self, acceptance: Acceptance | None = None) -> None:
        self.acceptance = acceptance or Acceptance()
        self._nodes: Candidates = ()

    def acceptance_prob(self, candidate: Candidate) -> float:
        """Probability that ``candidate`` is accepted if its parent is."""
        return self.acceptance.prob(of_probability(candidate.prob))

    def set_candidates(self, nodes: Candidates) -> None:
        """Set this step's candidates, siblings in descending order of probability."""
        self._nodes = nodes

    def learn(self, step: Step) -> None:
        """Compare the candidates with the step's tokens, then forget them.

        Candidates that were not decoded count, too: the text shows whether they were right.
        """
        children: dict[int, list[int]] = {}
        for c, node in enumerate(self._nodes):
            children.setdefault(node.parent, []).append(c)
        parent = -1
        for token in step.tokens:
            if parent not in children:
                break
            first = self._nodes[children[parent][0]]
            self.acceptance.learn(of_probability(first.prob), accepted=first.token == token)
            matching = [c for c in children[parent] if self._nodes[c].token == token]
            if not matching:
                break
            parent = matching[0]
        self._nodes = ()


class LevelTime:
    """The average time of a tree level, and the path probability at which one more pays off."""

    def __init__(
        self, target_seconds: Callable[[], float] | None = None, share: float = 0.5
    ) -> None:
        """``target_seconds`` returns the cost of a target step; None ignores drafting time.

        A level counts as ``share`` of that until one was timed. With too low a share, the first
        draft is so long that a slow source looks hopeless.
        """
        self._target_seconds = target_seconds
        self._share = share
        self._seconds = 0.0  # average per level; 0 = not known yet

    @classmethod
    def of(cls, name: str, resources: Resources, share: float = 0.5) -> LevelTime:
        """The one of a method, kept from text to text."""
        return resources.keep(("level time", name), lambda: cls(resources.step_seconds, share))

    def min_path_prob(self, budget: DraftBudget) -> float:
        """Path probability below which another level is not worth its row and drafting time."""
        if not budget.min_path_prob or self._target_seconds is None:
            return budget.min_path_prob
        share = self._seconds / self._target_seconds() if self._seconds else self._share
        return budget.min_path_prob + share

    def record(self, seconds: float, nodes: Candidates) -> None:
        """Record the time it took to find ``nodes`` below the root."""
        if nodes:
            level = seconds / max(depths_of(nodes))
            self._seconds += RATE * (level - self._seconds) if self._seconds else level
