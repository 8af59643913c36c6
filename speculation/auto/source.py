"""Source: one of auto's drafters, with its calibration, credit and cooldown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Step

# Credit is counted in plain steps.
_CREDIT_LIMIT = 0.4  # loss at which a source is disabled
_CHEAP_CREDIT_LIMIT = 2.0  # for a cheap source: a reply may start to copy only after a few words
_MAX_CREDIT = 8.0
_EXPLORATION_BUDGET = 0.008  # share of run time for a source that does not pay off
_MAX_BACKOFF = 4  # longest cooldown, relative to the first
RATE = 1 / 16  # of moving averages
_LEARNING_RATE = 0.05  # of the calibration, as in ``estimates``
_MAX_LOG_ODDS = 4.0
# A source is cheap if drafting takes at most this share of a plain step. A lookup is, but no model,
# however small: in replies of a few tokens its tries would not pay off.
_CHEAP = 0.12


class Source:
    """A drafter, its calibrated confidence and its credit.

    Credit is counted in plain steps: an accepted draft saves one step minus the cost of its row,
    and drafting time is subtracted. A source with negative credit is disabled for a cooldown that
    keeps exploration under 1% of run time, then tried again. If an expensive source still does not
    pay off, its next cooldown is twice as long. Rejected rows are not charged: the selection chose
    them, and the estimates learn from them.

    Within a step a source drafts only if the probability mass left by the sources before it is
    worth its time: a draft model adds nothing to a copy that is almost certain.
    """

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.name = name
        self.drafter = drafter
        self.explored_seconds = 0.0  # cost of this step's exploration rows
        self.credit = 0.0
        self.seconds = 0.0  # spent in this step
        self._begin_seconds = 0.0  # spent on starting the text, not yet charged
        self.has_drafted = False  # in this step
        self._mean_seconds = 0.0  # average time of a step in which it drafts
        self._mean_gain = 0.0  # average time saved in such a step
        self._mean_open = 0.0  # average probability that all earlier sources' drafts are wrong
        self._log_odds = 0.0  # correction of its confidence when other sources draft, too
        self._plain_seconds = 1.0  # cost of a plain step
        self.enabled_at = 0.0  # step at which its cooldown ends
        self._backoff = 1  # factor of the next cooldown
        self._prompt: Sequence[int] | None = None  # of a text its drafter has not started yet

    @property
    def explores(self) -> bool:
        """Whether it adds exploration rows."""
        return self.drafter.explored_rows > 0

    def is_enabled_for_text(self, now: int) -> bool:
        """Whether it would be enabled for a text that starts after step ``now``."""
        return self.enabled_at <= now or self._is_cheap

    @property
    def needs_timing(self) -> bool:
        """Whether every step must be timed, even if it is the only enabled source."""
        return self._prompt is not None or self.explores or not self._is_cheap

    @property
    def _is_cheap(self) -> bool:
        return self._mean_seconds <= _CHEAP * self._plain_seconds

    def is_worth(self, left: float) -> bool:
        """Whether to draft if all drafts so far are wrong with probability ``left``.

        Assumes the gain is proportional to ``left``. A source that does not pay off still drafts
        if it has the step to itself (``left`` = 1), where it may improve.
        """
        if not self._mean_open:  # not tried yet
            return left > 0.0
        gain = max(self._mean_gain / self._mean_open, self._mean_seconds)
        return left * gain >= self._mean_seconds

    def calibrated(self, prob: float) -> float:
        """The acceptance probability of a draft that the source estimates at ``prob``.

        The source's own estimates count outcomes in all steps. They are too high for the harder
        steps that earlier sources leave to it.
        """
        if not 0.0 < prob < 1.0:
            return prob
        return 1.0 / (1.0 + (1.0 - prob) / prob * math.exp(-self._log_odds))

    def learn(self, prob: float, *, accepted: bool) -> None:
        """Update the calibration: a draft with calibrated probability ``prob`` was verified."""
        change = _LEARNING_RATE * (accepted - prob)
        self._log_odds = max(-_MAX_LOG_ODDS, min(_MAX_LOG_ODDS, self._log_odds + change))

    def begin(self, prompt: Sequence[int], now: int) -> None:
        """Start a text after step ``now``. A cheap source is enabled again."""
        if self._is_cheap:
            self.enabled_at = self.credit = 0.0
        self._prompt = prompt
        if self.enabled_at <= now:
            seconds = self._begin_drafter()
            if not self._is_cheap:  # a cheap one may index a text of any length
                self._begin_seconds = seconds

    def draft(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget, left: float = 1.0
    ) -> None:
        """Add drafts to ``tree`` if that is worth the time; see ``is_worth``."""
        self.seconds = 0.0
        self.has_drafted = self.is_worth(left)
        if self.has_drafted:
            if self._prompt is not None:
                self._begin_seconds = self._begin_drafter()
            start = perf_counter()
            self.drafter.draft(tokens, tree, budget)
            self.seconds = perf_counter() - start
            self._mean_open += RATE * (left - self._mean_open)

    def observe(self, step: Step, gain: float, plain: float, now: int, n_steps: int = 1) -> None:
        """Pass the step to the drafter and update the credit.

        gain     seconds its drafts saved in this step and the ``n_steps - 1`` before
        plain    seconds of a plain step
        now      steps so far
        """
        if self._prompt is not None:  # has not started this text
            return
        start = perf_counter()
        self.drafter.observe(step)
        self.seconds += perf_counter() - start
        # Clipped: the operating system may have interrupted the step.
        mean = self._mean_seconds or self.seconds
        spent = min(self.seconds, 3 * mean)
        if self.has_drafted:
            self._mean_seconds = mean + RATE * (spent - mean)
            self._mean_gain += RATE * (gain - self._mean_gain)
        self._plain_seconds = plain
        balance = gain - n_steps * spent - self.explored_seconds - self._begin_seconds
        credit = self.credit + balance / plain
        self.explored_seconds = self._begin_seconds = 0.0
        is_cheap = self._is_cheap
        limit = _CHEAP_CREDIT_LIMIT if is_cheap else _CREDIT_LIMIT
        if credit > 0.0:
            self._backoff = 1
        elif credit < -limit:
            self.enabled_at = now - self._backoff * credit / _EXPLORATION_BUDGET
            if not is_cheap:
                self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
            credit = -0.5 * limit  # on probation after the cooldown
        self.credit = min(credit, _MAX_CREDIT)

    def _begin_drafter(self) -> float:
        """Start the drafter on the pending text; return the seconds it took."""
        assert self._prompt is not None
        start = perf_counter()
        self.drafter.begin(self._prompt)
        self._prompt = None
        return perf_counter() - start
