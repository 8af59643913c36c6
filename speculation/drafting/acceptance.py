"""Acceptance: how likely a draft is accepted, by its kind and the strength of its evidence.

A method gives every draft a strength: the length of a match, or the probability that a model gave
it. What that is worth is learnt here for all methods, so none has tables of its own. The log-odds
of acceptance start from a line over the logarithm of a length or the log-odds of a probability; a
method gives that line, two numbers, for each kind of draft it tells apart.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy

# Rate of learning and of moving averages: 0.05 was as good as 0.1 in a replay of 350 replies,
# better than 0.2 and 0.3.
RATE = 0.05
# Rate at which a text's own predictability is learnt, within a few failures or successes. Replayed
# with the costs of an H200, 0.05 loses up to 4% more in prose.
_TEXT_RATE = 0.3
N_STRENGTHS = 10
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # the shortest match of each strength


def by_length(start: float, slope: float) -> list[float]:
    """Log-odds by strength: ``start`` for a match of one token, ``slope`` more for twice as many.

    >>> [round(1 / (1 + math.exp(-log_odds)), 2) for log_odds in by_length(0.0, 0.8)][:4]
    [0.5, 0.69, 0.78, 0.83]
    """
    return [start + slope * math.log2(length) for length in _LENGTHS]


def by_probability(start: float = -0.1, slope: float = 0.85) -> list[float]:
    """Log-odds by strength: ``start`` at probability 0.5, ``slope`` for each of its log-odds.

    The defaults are what drafting heads and draft models were found to be worth: a little less than
    the probability they give.
    """
    middles = [(i + 0.5) / N_STRENGTHS for i in range(N_STRENGTHS)]
    return [start + slope * math.log(p / (1 - p)) for p in middles]


def of_length(length: int) -> int:
    """The strength of a match of ``length`` tokens; 0, the first token of all, counts as 1."""
    return max(0, bisect_right(_LENGTHS, length) - 1)


def of_probability(prob: float) -> int:
    """The strength of a draft to which a model gave ``prob``."""
    return min(N_STRENGTHS - 1, int(N_STRENGTHS * prob))


BY_PROBABILITY = by_probability()


class Acceptance:
    """The acceptance probability of each cell: of a kind of draft with a strength.

    Cell ``10 * kind + strength``. Each outcome moves the log-odds of its cell, which all texts
    share. It also moves an offset that is added to all cells of its text alone (``of_text``),
    because some texts are more predictable than others.

    log_odds  by cell, without the offset

    >>> acceptance = Acceptance(by_length(0.0, 0.8))
    >>> acceptance.learn(0, accepted=True)
    >>> round(acceptance.prob(0), 4)
    0.5125
    """

    def __init__(self, priors: Sequence[float] = BY_PROBABILITY, log_odds: object = None) -> None:
        """``priors`` are ``by_length`` or ``by_probability``, one after the other for each kind.

        ``log_odds`` are those of an earlier run; of another form, they are ignored.
        """
        self.log_odds = list(priors)
        if isinstance(log_odds, list) and len(log_odds) == len(priors):
            self.log_odds = [float(value) for value in log_odds]
        self._offset = 0.0
        self._latest = self  # keeps the offset of whichever text learnt last
        self._probs: dict[int, float] = {}  # cache by cell, cleared on learning

    def state(self) -> list[float]:
        return self.log_odds

    def of_text(self) -> Acceptance:
        """The acceptance in a text that begins, from half the offset of whichever learnt last."""
        text = copy(self)
        text._offset, text._probs = 0.5 * self._offset, {}
        return text

    def prob(self, cell: int) -> float:
        """The probability that a draft of this cell is accepted."""
        return 1.0 / (1.0 + math.exp(-self.log_odds[cell] - self._offset))

    def chain_probs(self, cells: Iterable[int], floor: float, before: float = 1.0) -> list[float]:
        """The acceptance probabilities of a chain's tokens.

        Stops where the path probability, which starts from ``before``, falls below ``floor``.
        """
        cached, probs, path_prob = self._probs, [], before
        for cell in cells:
            try:
                p = cached[cell]
            except KeyError:
                p = cached[cell] = self.prob(cell)
            path_prob *= p
            if path_prob < floor:
                break
            probs.append(p)
        return probs

    def learn(self, cell: int, *, accepted: bool) -> None:
        """Learn whether a draft of this cell was accepted."""
        self.learn_chain((cell,), int(accepted), failed=not accepted)

    def learn_chain(self, cells: Sequence[int], n_accepted: int, *, failed: bool) -> None:
        """Learn the outcome of a chain.

        ``n_accepted`` tokens were accepted; if ``failed``, the next one was rejected.
        """
        self._probs.clear()
        log_odds, offset, exp = self.log_odds, self._offset, math.exp
        for i, cell in enumerate(cells[:n_accepted]):
            rejection = 1.0 / (1.0 + exp(log_odds[cell] + offset))  # its probability
            log_odds[cell] += RATE * rejection
            if not i:  # of a chain, since its tokens are right or wrong together
                offset += _TEXT_RATE * rejection
        if failed:
            cell = cells[n_accepted]
            acceptance = 1.0 / (1.0 + exp(-log_odds[cell] - offset))
            log_odds[cell] -= RATE * acceptance
            offset -= _TEXT_RATE * acceptance
        self._offset = self._latest._offset = offset
