"""Estimates: how likely a draft of some kind is to hold, counted while a text is generated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_RATE = 0.05  # replayed on 350 replies: as good as 0.1, better than 0.2 and 0.3
_SHARED_LIMIT = 2.5


class Estimates:
    """A probability for each kind of draft; kinds are numbered, the last stands for all beyond.

    Starts from priors and follows the outcomes: each moves the log-odds of its kind, which are kept
    for good, and those of all kinds together, since some texts are predictable throughout and
    others are not. The latter fade when another text begins.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._log_odds = [math.log(p / (1 - p)) for p in priors]
        self._last = len(priors) - 1
        self._shared = 0.0
        self._probs: dict[int, float] = {}  # by kind, as asked for since something was learnt

    def of(self, kind: int) -> float:
        """The probability that a draft of this kind holds."""
        log_odds = self._log_odds[min(kind, self._last)] + self._shared
        return 1.0 / (1.0 + math.exp(-log_odds))

    def chain_probs(self, kinds: Iterable[int], probability: float, floor: float) -> list[float]:
        """The probabilities of tokens in a row, of these kinds.

        As many as hold all together with at least ``floor``, given ``probability`` that the first
        is reached.
        """
        known, found = self._probs, []
        for kind in kinds:
            try:
                p = known[kind]
            except KeyError:
                p = known[kind] = self.of(kind)
            probability *= p
            if probability < floor:
                break
            found.append(p)
        return found

    def learn(self, kind: int, *, accepted: bool) -> None:
        """Take in whether a draft of this kind was right."""
        self.learn_chain((kind,), int(accepted), failed=not accepted)

    def learn_chain(self, kinds: Sequence[int], n_accepted: int, *, failed: bool) -> None:
        """Take in the outcome of a chain of these kinds: ``n_accepted`` tokens were accepted, and
        the one after them was rejected, if ``failed``."""
        self._probs.clear()
        log_odds, shared, last, exp = self._log_odds, self._shared, self._last, math.exp
        for kind in kinds[:n_accepted]:
            i = kind if kind < last else last
            change = _RATE / (1.0 + exp(log_odds[i] + shared))  # by how likely it was not to hold
            log_odds[i] += change
            shared += change
            if shared > _SHARED_LIMIT:
                shared = _SHARED_LIMIT
        if failed:
            i = min(kinds[n_accepted], last)
            change = _RATE / (1.0 + exp(-log_odds[i] - shared))
            log_odds[i] -= change
            shared = max(-_SHARED_LIMIT, shared - change)
        self._shared = shared

    def new_text(self) -> None:
        """Another text begins: what the last one was like as a whole says less about it."""
        self._shared *= 0.5
        self._probs.clear()
