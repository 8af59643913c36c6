"""Estimates: online acceptance probabilities by kind of draft."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# Rate of learning and of moving averages: 0.05 was as good as 0.1 in a replay of 350 replies,
# better than 0.2 and 0.3.
RATE = 0.05


class Estimates:
    """The acceptance probability of each kind of draft; the last kind stands for all beyond it.

    Starts from priors. Each outcome moves the log-odds of its kind, which persist, and an offset
    shared by all kinds, because some texts are more predictable than others. The offset is halved
    when another text begins.

    log_odds  by kind, without the offset

    >>> estimates = Estimates([0.5])
    >>> estimates.learn(0, accepted=True)
    >>> round(estimates.prob(0), 4)
    0.5125
    """

    def __init__(self, priors: Sequence[float], log_odds: object = None) -> None:
        """``log_odds`` are those of an earlier run; of another form, they are ignored."""
        self.log_odds = [math.log(p / (1 - p)) for p in priors]
        if isinstance(log_odds, list) and len(log_odds) == len(priors):
            self.log_odds = [float(value) for value in log_odds]
        self._last = len(priors) - 1
        self._shared = 0.0
        self._probs: dict[int, float] = {}  # cache by kind, cleared on learning

    def prob(self, kind: int) -> float:
        """The probability that a draft of this kind is accepted."""
        log_odds = self.log_odds[min(kind, self._last)] + self._shared
        return 1.0 / (1.0 + math.exp(-log_odds))

    def chain_probs(self, kinds: Iterable[int], probability: float, floor: float) -> list[float]:
        """The acceptance probabilities of a chain of these kinds.

        Stops where the path probability, starting from ``probability``, falls below ``floor``.
        """
        cached, probs = self._probs, []
        for kind in kinds:
            try:
                p = cached[kind]
            except KeyError:
                p = cached[kind] = self.prob(kind)
            probability *= p
            if probability < floor:
                break
            probs.append(p)
        return probs

    def learn(self, kind: int, *, accepted: bool) -> None:
        """Learn whether a draft of this kind was accepted."""
        self.learn_chain((kind,), int(accepted), failed=not accepted)

    def learn_chain(self, kinds: Sequence[int], n_accepted: int, *, failed: bool) -> None:
        """Learn the outcome of a chain of these kinds.

        ``n_accepted`` tokens were accepted; if ``failed``, the next one was rejected.
        """
        self._probs.clear()
        log_odds, shared, last, exp = self.log_odds, self._shared, self._last, math.exp
        for kind in kinds[:n_accepted]:
            i = kind if kind < last else last
            change = RATE / (1.0 + exp(log_odds[i] + shared))  # rate × probability of rejection
            log_odds[i] += change
            shared += change
        if failed:
            i = min(kinds[n_accepted], last)
            change = RATE / (1.0 + exp(-log_odds[i] - shared))
            log_odds[i] -= change
            shared -= change
        self._shared = shared

    def new_text(self) -> None:
        """Start another text: halve the shared offset."""
        self._shared *= 0.5
        self._probs.clear()
