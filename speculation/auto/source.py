"""Source: one of auto's drafters, and the estimate of what asking it gains."""

from __future__ import annotations

from collections.abc import Container, Sequence

from batching.together import Coroutine, own_time
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Step
from speculation.drafting.acceptance import RATE

# What trying a source costs that is not expected to pay off, as a share of the run time; twice as
# much with several texts, all of which learn from a try. Replayed, 0.01 costs short replies of
# small models 1% if there is one text, and 0.005 costs 16 texts 4% where rows are cheap.
EXPLORATION = 0.005


class Gains:
    """What asking a drafter gains, in plain steps; shared by all texts.

    The gain of an ask is the number of its drafts that are accepted, less what its rows and its
    time cost. It starts from a general value and is learnt for this model, by the strength of the
    drafter's evidence (``Drafter.strength``). What a text changes is in the drafts' probabilities.

    by_strength  the gain; 0 at strength 0
    cost         average time of an ask, in plain steps
    reading      average time to read a prompt token, in plain steps
    explore_at   step from which the drafter may be tried although no gain is expected
    """

    def __init__(self, gains: Sequence[float] = (0.3,), state: object = None) -> None:
        """``gains`` are the general ones, by strength from 1; ``state`` is that of an earlier run.

        A state of another form is ignored.
        """
        self.by_strength = [0.0, *gains]
        self.cost = 0.0
        self.reading = 0.0
        if isinstance(state, list) and len(state) == len(self.state()):
            *self.by_strength, self.cost, self.reading = state
        self.explore_at = 0.0

    def state(self) -> list[float]:
        """What was learnt about the model."""
        return [*self.by_strength, self.cost, self.reading]

    def is_idle(self, now: int) -> bool:
        """Whether nothing is gained, however strong the evidence, and no try is due."""
        return now < self.explore_at and max(self.by_strength) <= 0.0

    def expected(self, strength: int, left: float, drafted: float) -> float:
        """The gain expected of an ask, beside other drafts or instead of them.

        left     probability that all drafts of other sources in this step are wrong
        drafted  how many of them are expected to be accepted
        """
        gain = self.by_strength[strength]
        if left < 1.0:
            tokens = gain + self.cost
            gain = max(left * tokens, tokens - drafted) - self.cost
        return gain

    def learn_reading(self, n: int, spent: float) -> None:
        """A prompt of ``n`` tokens was read in ``spent`` plain steps.

        By token, over about the last thousand: a short text's fixed time must not decide.
        """
        self.reading += (spent - self.reading * n) / (n + (1000 if self.reading else 0))

    def start_try(self, now: int) -> None:
        """It is asked though no gain is expected. The other texts of the step need not try it."""
        self.explore_at = now + 1 / EXPLORATION

    def learn(
        self,
        strength: int,
        left: float,
        gain: float,
        spent: float,
        owed: float,
        now: int,
        n_texts: int,
    ) -> None:
        """An ask gained ``gain`` before its time, ``spent``; trying it also cost ``owed``."""
        if self.cost:  # an interrupted one counts three times the usual at most
            spent = min(spent, 3.0 * self.cost)
            self.cost += RATE * (spent - self.cost)
        else:
            self.cost = spent
        gain -= spent
        expected = left * (self.by_strength[strength] + self.cost) - self.cost
        self.by_strength[strength] += RATE * left * (gain - expected)
        if expected <= 0.0:  # it was tried: its time is lost, and its luck counts on average
            lost = owed + max(spent, -min(expected, self.by_strength[strength]))
            self.explore_at = now + lost / (EXPLORATION * min(n_texts, 2))


class Source:
    """A drafter of one text, asked when that is expected to gain something.

    If not, it is tried now and then, so rarely that its losses stay below a share of the run time,
    EXPLORATION.
    """

    def __init__(self, name: str, drafter: Drafter, gains: Gains | None = None) -> None:
        self.name = name
        self.drafter = drafter
        self.gains = gains or Gains()
        self.asked_with = 0  # strength with which it was asked in this step; 0 = not asked
        self.nodes: Sequence[int] = ()  # of the step's tree that it drafted
        self.seconds = 0.0  # spent in this step
        self._prompt: Sequence[int] | None = None  # of a text that the drafter has not read yet
        self._missed = 0.0  # gain missed in this text because it was not read
        self._owed = 0.0  # time of reading the text to try it
        self._left = 1.0
        self._is_try = False  # whether it is asked although no gain is expected
        self._follows = False  # whether it was asked and has seen every step since

    def begin(self, prompt: Sequence[int], row: float, plain: float) -> Coroutine[None]:
        """A new text starts. The drafter reads it now if that takes next to nothing.

        Otherwise it waits until the gain missed in this text would have paid for reading it: a text
        that has gone on for long will probably go on as long again.

        row    the target's seconds for a prompt token
        plain  seconds of a plain step
        """
        self._prompt, self._missed, self._follows = prompt, 0.0, False
        if self.gains.reading * plain <= 2 * EXPLORATION * row:
            yield from self.read(plain)

    @property
    def is_unread(self) -> bool:
        """Whether the drafter has to read the text before it can draft."""
        return self._prompt is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether its drafter should read the target's states while the prompt is decoded."""
        return self.gains.by_strength[-1] > 0.0

    def strength(
        self,
        tokens: Sequence[int],
        now: int,
        plain: float,
        left: float = 1.0,
        drafted: float = 0.0,
    ) -> int:
        """The strength with which to ask it after ``tokens``; 0 if it is not worth its time.

        While it ``is_unread``, 1 if it should read the text now.

        now      steps so far
        plain    seconds of a plain step
        left     probability that all drafts of other sources in this step are wrong
        drafted  how many of them are expected to be accepted
        """
        gains = self.gains
        may_explore = now >= gains.explore_at and left > 0.5
        if self._prompt is not None:
            strengths = range(1, len(gains.by_strength))
            gain = max([gains.expected(i, left, drafted) for i in strengths])
            to_read = gains.reading * len(self._prompt)
            self._missed += max(0.0, gain)
            if gain <= 0.0 and may_explore:
                self._owed = to_read
            elif gain <= 0.0 or self._missed < to_read:
                return 0
            return 1
        strength = min(self.drafter.strength(tokens), len(gains.by_strength) - 1)
        if not strength:
            return 0
        self._is_try = gains.expected(strength, left, drafted) <= 0.0
        return strength if may_explore or not self._is_try else 0

    def read(self, plain: float) -> Coroutine[None]:
        """Let the drafter read the text."""
        prompt, self._prompt = self._prompt, None
        assert prompt is not None
        start = own_time.now()
        reading = self.drafter.begin(prompt)
        if reading is not None:
            yield from reading
        self.gains.learn_reading(len(prompt), (own_time.now() - start) / plain)

    def draft(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        budget: DraftBudget,
        strength: int,
        left: float,
        now: int,
    ) -> Coroutine[None]:
        """Add its drafts to ``tree``, which has no others."""
        start = own_time.now()
        if self._is_try:
            self.gains.start_try(now)
        drafting = self.drafter.draft(tokens, tree, budget)
        if drafting is not None:
            yield from drafting
        self.asked_with, self._left, self._follows = strength, left, True
        self.seconds = own_time.now() - start

    def observe(self, step: Step) -> None:
        """Pass on a step, whether or not it was asked in it."""
        if self._follows:
            start = own_time.now()
            self.drafter.observe(step)
            self.seconds += own_time.now() - start

    def skip(self) -> None:
        """There were steps that it has not seen."""
        self._follows = False

    def learn(
        self,
        accepted: Container[int],
        row: float,
        rest: float,
        now: int,
        plain: float,
        n_texts: int,
    ) -> None:
        """Learn from a step in which it was asked.

        accepted  nodes of the tree
        row       cost of a row, in plain steps
        rest      seconds besides decoding and drafting
        now       steps so far
        plain     seconds of a plain step
        n_texts   texts in the batch
        """
        gain = sum([node in accepted for node in self.nodes]) - row * len(self.nodes)
        spent = (self.seconds + rest) / plain
        strength, left, owed = self.asked_with, self._left, self._owed
        self.gains.learn(strength, left, gain, spent, owed, now, n_texts)
        self._owed = 0.0
