"""Source: one of auto's drafters, with the estimate of what asking it gains."""

from __future__ import annotations

from collections.abc import Container, Sequence
from time import perf_counter

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Step
from speculation.drafting.estimates import RATE

# What trying a source costs that is not expected to pay off, as a share of the run time. Replayed,
# 0.01 costs short replies of small models 1% and gains nothing elsewhere.
EXPLORATION = 0.005
# Plain steps that an ask can gain or lose. A long copy must not decide for hundreds of steps after
# it, accepted or not. Replayed, 2 and 8 are alike, and no limit is 0.2% slower.
_MAX_GAIN = 4.0


class Source:
    """A drafter and the gain of asking it, in plain steps.

    The gain is the number of its drafts that are accepted, less what its rows and its time cost. It
    starts from a general value and is learnt for this model, by the strength of the drafter's
    evidence (``Drafter.strength``). What a text changes is in the drafts' probabilities.

    A source is asked if its expected gain is positive. If not, it is tried now and then, so rarely
    that its losses stay below EXPLORATION of the run time.
    """

    def __init__(
        self, name: str, drafter: Drafter, gains: Sequence[float] = (0.3,), state: object = None
    ) -> None:
        """``gains`` are the general ones, by strength from 1; ``state`` is that of an earlier run.

        A state of another form is ignored.
        """
        self.name = name
        self.drafter = drafter
        self.asked_with = 0  # strength with which it was asked in this step; 0 = not asked
        self.nodes: Sequence[int] = ()  # of the step's tree that it drafted
        self.seconds = 0.0  # spent in this step
        self._gains = [0.0, *gains]  # by strength
        self._cost = 0.0  # average time of an ask, in plain steps
        self._reading = 0.0  # average time to read a prompt token, in plain steps
        if isinstance(state, list) and len(state) == len(self.state()):
            *self._gains, self._cost, self._reading = state
        self._explore_at = 0.0  # step from which it may be tried
        self._prompt: Sequence[int] | None = None  # of a text that the drafter has not read yet
        self._missed = 0.0  # gain missed in this text because it was not read
        self._owed = 0.0  # time of reading the text to try it
        self._left = 1.0
        self._follows = False  # whether it was asked and has seen every step since

    def state(self) -> list[float]:
        """What it has learnt about the model."""
        return [*self._gains, self._cost, self._reading]

    def begin(self, prompt: Sequence[int], row: float, plain: float) -> None:
        """A new text starts. The drafter reads it now if that takes next to nothing.

        Otherwise it waits until the gain missed in this text would have paid for reading it: a text
        that has gone on for long will probably go on as long again.

        row    the target's seconds for a prompt token
        plain  seconds of a plain step
        """
        self._prompt, self._missed, self._follows = prompt, 0.0, False
        if self._reading * plain <= 2 * EXPLORATION * row:
            self._read(plain)

    @property
    def reads_prompt(self) -> bool:
        """Whether its drafter should read the target's states while the prompt is decoded."""
        return self._gains[-1] > 0.0

    def is_idle(self, now: int) -> bool:
        """Whether it gains nothing, however strong its evidence, and is not to be tried yet."""
        return now < self._explore_at and max(self._gains) <= 0.0

    def strength(
        self,
        tokens: Sequence[int],
        now: int,
        plain: float,
        left: float = 1.0,
        drafted: float = 0.0,
    ) -> int:
        """The strength with which to ask it after ``tokens``; 0 if it is not worth its time.

        now      steps so far
        plain    seconds of a plain step
        left     probability that all drafts of other sources in this step are wrong
        drafted  how many of them are expected to be accepted
        """
        may_explore = now >= self._explore_at and left > 0.5
        if self._prompt is not None:
            gain = max([self._expected(i, left, drafted) for i in range(1, len(self._gains))])
            to_read = self._reading * len(self._prompt)
            self._missed += max(0.0, gain)
            if gain <= 0.0 and may_explore:
                self._owed = to_read
            elif gain <= 0.0 or self._missed < to_read:
                return 0
            self._read(plain)
        strength = min(self.drafter.strength(tokens), len(self._gains) - 1)
        if strength and (may_explore or self._expected(strength, left, drafted) > 0.0):
            return strength
        return 0

    def _expected(self, strength: int, left: float, drafted: float) -> float:
        """The gain expected of asking it, beside other drafts or instead of them."""
        gain = self._gains[strength]
        if left < 1.0:
            tokens = gain + self._cost
            gain = max(left * tokens, tokens - drafted) - self._cost
        return gain

    def _read(self, plain: float) -> None:
        prompt, self._prompt = self._prompt, None
        assert prompt is not None
        start = perf_counter()
        self.drafter.begin(prompt)
        n, spent = len(prompt), (perf_counter() - start) / plain
        # By token, over about the last thousand: a short text's fixed time must not decide.
        self._reading += (spent - self._reading * n) / (n + (1000 if self._reading else 0))

    def draft(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        budget: DraftBudget,
        strength: int,
        left: float,
    ) -> None:
        """Add its drafts to ``tree``, which has no others."""
        start = perf_counter()
        self.drafter.draft(tokens, tree, budget)
        self.asked_with, self._left, self._follows = strength, left, True
        self.seconds = perf_counter() - start

    def observe(self, step: Step) -> None:
        """Pass on a step, whether or not it was asked in it."""
        if self._follows:
            start = perf_counter()
            self.drafter.observe(step)
            self.seconds += perf_counter() - start

    def skip(self) -> None:
        """There were steps that it has not seen."""
        self._follows = False

    def learn(
        self, accepted: Container[int], row: float, rest: float, now: int, plain: float
    ) -> None:
        """Learn from a step in which it was asked.

        accepted  nodes of the tree
        row       cost of a row, in plain steps
        rest      seconds besides decoding and drafting
        now       steps so far
        plain     seconds of a plain step
        """
        gain = sum([node in accepted for node in self.nodes]) - row * len(self.nodes)
        spent = (self.seconds + rest) / plain
        if self._cost:  # an interrupted one counts three times the usual at most
            spent = min(spent, 3.0 * self._cost)
            self._cost += RATE * (spent - self._cost)
        else:
            self._cost = spent
        strength, left = self.asked_with, self._left
        gain = max(-_MAX_GAIN, min(gain, _MAX_GAIN)) - spent
        expected = left * (self._gains[strength] + self._cost) - self._cost
        if expected <= 0.0:  # it was tried
            self._explore_at = now + max(0.0, self._owed - gain) / EXPLORATION
        self._owed = 0.0
        self._gains[strength] += RATE * left * (gain - expected)
