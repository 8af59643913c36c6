"""Source: a drafter among others, and whether it has been worth its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Step

_CREDIT_LIMIT = 0.4  # plain steps' worth of time that a source may lose before it is disabled …
_CHEAP_CREDIT_LIMIT = 2.0  # … if it is cheap: a copy may begin after a few words of a reply's own
_EXPLORATION_BUDGET = 0.008  # share of run time that a source which does not pay may take
_MAX_BACKOFF = 4  # a cooldown is longer by this factor at most, after tries that have not paid
RATE = 1 / 16  # of moving averages
_LEARNING_RATE = 0.05  # of the calibration of a source's confidence, as in ``estimates``
_MAX_LOG_ODDS = 4.0
# Share of a plain step that drafting takes at most for a source to be cheap: looking something up
# is, and no model, however small, since replies of a few tokens would pay for its tries.
_CHEAP = 0.12
_MAX_CREDIT = 8.0  # plain steps' worth of time beyond which what a source gained is not remembered


class Source:
    """A drafter, its calibrated confidence and its credit.

    Credit is counted in plain steps: an accepted draft saves one step less its row, and every
    microsecond of drafting costs part of one. A source with negative credit is disabled for a
    cooldown that keeps exploration under 1% of run time. Then it may try again; if a dear one does
    not pay then, its next cooldown is twice as long. Rejected rows are not charged to it: which
    rows to decode is the selection's decision, and the estimates learn from them.

    Within a step it is asked only if what the sources before it leave open is worth its time: a
    draft model has nothing to add to a copy that is almost certain.
    """

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.name = name
        self.drafter = drafter
        self.explored_seconds = 0.0  # what this step's rows of exploration cost
        self.credit = 0.0
        self.seconds = 0.0  # spent in this step
        self._reading = 0.0  # spent on reading the text, and not yet charged
        self.has_drafted = False  # in this step
        self._usual = 0.0  # spent in a step in which it drafts, on average
        self._gained = 0.0  # saved in such a step, on average
        self._open = 0.0  # how likely all drafts before its own were to be wrong, on average
        self._log_odds = 0.0  # correction of its confidence where other sources draft too
        self._plain = 1.0  # cost of a plain step
        self.enabled_at = 0.0  # step, on the clock of the step before
        self._backoff = 1  # factor of its next cooldown
        self._prompt: Sequence[int] | None = None  # a text that it has not begun with yet

    @property
    def explores(self) -> bool:
        """Whether it adds rows of exploration."""
        return self.drafter.explored_rows > 0

    def is_enabled_for_text(self, now: int) -> bool:
        """Whether it would be enabled if another text began after step ``now``."""
        return self.enabled_at <= now or self._is_cheap

    @property
    def needs_timing(self) -> bool:
        """Whether its time has to be taken in every step, even where it is the only one."""
        return self._prompt is not None or self.explores or not self._is_cheap

    @property
    def _is_cheap(self) -> bool:
        return self._usual <= _CHEAP * self._plain

    def is_worth(self, left: float) -> bool:
        """Whether it should draft where all drafts so far are wrong with probability ``left``.

        What it saves is taken to be proportional to that. One that does not pay for itself may
        still show in a step that is wholly its own that it has become better.
        """
        worth = max(self._gained / self._open, self._usual) if self._open else math.inf
        return left * worth >= self._usual

    def calibrated(self, prob: float) -> float:
        """How likely a draft is to be accepted that it gives ``prob``, in the steps it is asked in.

        It counts outcomes in all steps. Asked where the others know nothing, it knows less than it
        does on the whole.
        """
        if not 0.0 < prob < 1.0:
            return prob
        return 1.0 / (1.0 + (1.0 - prob) / prob * math.exp(-self._log_odds))

    def learn(self, prob: float, *, accepted: bool) -> None:
        """A draft of its own, calibrated to ``prob``, was verified."""
        change = _LEARNING_RATE * (accepted - prob)
        self._log_odds = max(-_MAX_LOG_ODDS, min(_MAX_LOG_ODDS, self._log_odds + change))

    def begin(self, prompt: Sequence[int], now: int) -> None:
        """Another text, after step ``now``: a new chance, if trying costs little."""
        if self._is_cheap:
            self.enabled_at = self.credit = 0.0
        self._prompt = prompt
        if self.enabled_at <= now:
            seconds = self._catch_up()
            if not self._is_cheap:  # a cheap one may read every text, however long
                self._reading = seconds

    def draft(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget, left: float = 1.0
    ) -> None:
        """Add its drafts to ``tree``, if that is worth its time; see ``is_worth``."""
        self.seconds = 0.0
        self.has_drafted = self.is_worth(left)
        if self.has_drafted:
            if self._prompt is not None:
                self._reading = self._catch_up()
            start = perf_counter()
            self.drafter.draft(tokens, tree, budget)
            self.seconds = perf_counter() - start
            self._open += RATE * (left - self._open)

    def observe(self, step: Step, gain: float, plain: float, now: int, n_steps: int = 1) -> None:
        """Show the drafter the step, and update the source's credit.

        ``gain`` is what its drafts saved in this and the ``n_steps - 1`` steps before, and
        ``plain`` the cost of a plain step, both in seconds; ``now`` counts the steps.
        """
        if self._prompt is not None:  # it has not begun with this text
            return
        start = perf_counter()
        self.drafter.observe(step)
        self.seconds += perf_counter() - start
        # A step in which the system did something else is not the source's fault.
        usual = self._usual or self.seconds
        spent = min(self.seconds, 3 * usual)
        if self.has_drafted:
            self._usual = usual + RATE * (spent - usual)
            self._gained += RATE * (gain - self._gained)
        self._plain = plain
        balance = gain - n_steps * spent - self.explored_seconds - self._reading
        credit = self.credit + balance / plain
        self.explored_seconds = self._reading = 0.0
        is_cheap = self._is_cheap
        limit = _CHEAP_CREDIT_LIMIT if is_cheap else _CREDIT_LIMIT
        if credit > 0.0:
            self._backoff = 1
        elif credit < -limit:
            self.enabled_at = now - self._backoff * credit / _EXPLORATION_BUDGET
            if not is_cheap:
                self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
            credit = -0.5 * limit  # it is enabled again on probation
        self.credit = min(credit, _MAX_CREDIT)

    def _catch_up(self) -> float:
        """Begin with the text that it has not begun with yet; the seconds that took."""
        assert self._prompt is not None
        start = perf_counter()
        self.drafter.begin(self._prompt)
        self._prompt = None
        return perf_counter() - start
