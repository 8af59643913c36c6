"""Source: one of auto's drafters, and whether asking it is worth its time."""

from __future__ import annotations

from collections.abc import Container, Sequence

from batching import clock
from batching.together import Coroutine, own_time
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Step, drafted
from speculation.drafting.acceptance import RATE

# What trying a source costs that is not expected to pay off, as a share of the run time. Replayed,
# 0.01 costs short replies of small models 1% if there is one text.
EXPLORATION = 0.005


class Asks:
    """What asking a drafter brought on average, in all texts of this model on this machine.

    tokens    drafts of an ask that are accepted
    seconds   time that an ask takes, with that of its rows
    reading   time that it takes more for each token that the drafter has to read
    next_try  when the drafter may be asked although nothing is expected to be gained
    """

    def __init__(self, state: object = None, *, seconds: float = 0.0, reading: float = 0.0) -> None:
        """``state`` is that of an earlier run; one of another form, or damaged, is ignored. Without
        one an ask is expected to bring one token, and to take what the rest says."""
        self.tokens, self.seconds, self.reading = 1.0, seconds, reading
        if isinstance(state, list) and len(state) == len(self.state()) and min(state) >= 0.0:
            self.tokens, self.seconds, self.reading = state
        self.next_try = 0.0

    def state(self) -> list[float]:
        return [self.tokens, self.seconds, self.reading]

    def gain(self, plain: float, left: float = 1.0, drafted: float = 0.0) -> float:
        """Seconds that an ask gains, beside the drafts of other sources or instead of them.

        plain    seconds of a plain step
        left     probability that all drafts of other sources in this step are wrong
        drafted  how many of them are expected to be accepted
        """
        return max(left * self.tokens, self.tokens - drafted) * plain - self.seconds

    def learn(self, n_accepted: int, seconds: float, n_read: int = 0) -> None:
        """An ask took ``seconds``, in which the drafter also read ``n_read`` tokens.

        An interrupted one counts three times the usual at most. Reading is averaged over about the
        last thousand tokens, since a short text's fixed time must not decide.
        """
        self.tokens += RATE * (n_accepted - self.tokens)
        reading = self.reading * n_read
        if reading > self.seconds:
            self.reading += (seconds - self.seconds - reading) / (n_read + 1000)
        elif self.seconds:
            self.seconds += RATE * (min(seconds - reading, 3.0 * self.seconds) - self.seconds)
        else:
            self.seconds = seconds


class Source:
    """A drafter of one text.

    A drafter that tells how likely its draft is accepted is asked if that pays. The others are
    asked if asking paid on average, and tried now and then if it did not.
    """

    def __init__(self, name: str, drafter: Drafter, asks: Asks | None = None) -> None:
        self.name = name
        self.drafter = drafter
        self.asks = asks or Asks()
        self.nodes: Sequence[int] = ()  # of the step's tree that it drafted
        self.seconds = 0.0  # spent in this step
        self._n_read = 0  # tokens that it read in this step before it drafted
        self._since = 0  # length of the text when it last drafted, at first that of the prompt
        self._is_try = False  # whether it is asked although no gain is expected
        self._follows = False  # whether it was asked and has seen every step since

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts."""
        self._since, self._follows = len(prompt), False
        self.drafter.begin(prompt)

    def is_worth_asking(
        self,
        tokens: Sequence[int],
        plain: float,
        pays_from: float,
        spare: float,
        left: float = 1.0,
        drafted: float = 0.0,
    ) -> bool:
        """Whether to ask it after ``tokens``.

        What it has not read of the text is read once the gain missed since its last draft would
        have paid for that: a text that has gone on for long will probably go on as long again.

        pays_from  probability from which a draft pays; ``left`` and the rest as in ``Asks.gain``
        spare      seconds that a try may take
        """
        asks = self.asks
        promise = self.drafter.promise(tokens)
        if promise is not None:
            return left * promise >= pays_from
        reading = asks.reading * self.drafter.n_unread(tokens)
        gain = asks.gain(plain, left, drafted)
        self._is_try = gain <= 0.0
        if self._is_try:  # not where the other sources' drafts would hide what it is worth
            is_due = left > 0.5 and clock.now() >= asks.next_try
            return is_due and asks.seconds + reading <= spare
        return gain * (len(tokens) - self._since) >= reading

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        """Add its drafts to ``tree``, which has no others."""
        asks, self._n_read = self.asks, self.drafter.n_unread(tokens)
        if self._is_try:  # the other texts of the step need not try it
            lost = asks.seconds + asks.reading * self._n_read
            asks.next_try = clock.now() + lost / EXPLORATION
        start = own_time.now()
        yield from drafted(self.name, self.drafter, tokens, tree, budget)
        self._follows, self._since = True, len(tokens)
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

    def learn(self, accepted: Container[int], row: float, rest: float) -> None:
        """Learn from a step in which it was asked, whose ``accepted`` nodes are given.

        row   seconds of a row
        rest  its share of the seconds besides decoding and drafting
        """
        n_accepted = sum([node in accepted for node in self.nodes])
        spent = self.seconds + rest + row * len(self.nodes)
        self.asks.learn(n_accepted, spent, self._n_read)
