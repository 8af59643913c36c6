"""Source: one of auto's drafters, and whether asking it is worth its time."""

from __future__ import annotations

from collections.abc import Container, Sequence

from batching.together import Coroutine, own_time
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, PlainSteps, Step, drafted
from speculation.drafting.acceptance import RATE
from speculation.drafting.cost import SIZES, Prices

# What trying a source costs that is not expected to pay off, as a share of the run time. Replayed,
# 0.01 costs short replies of small models 1% if there is one text.
EXPLORATION = 0.005
_MOST_READ = 1000  # tokens over which the time of reading is averaged


class Asks:
    """What asking a drafter brought on average, in all texts of this model on this machine.

    tokens    drafts of an ask that are accepted
    seconds   time that an ask takes, with that of its rows
    reading   time that it takes more for each token that the drafter has to read
    worth     time that asks gain in a reply
    credit    time that asks may take of which nothing is expected to be gained
    tells     whether the drafter tells how likely its drafts are, and is asked by that
    """

    def __init__(self, state: object = None, *, seconds: float = 0.0, reading: float = 0.0) -> None:
        """``state`` is that of an earlier run; one of another form, or damaged, is ignored. Without
        one an ask is expected to bring one token, and to take what the rest says."""
        self.tokens, self.seconds, self.reading, self.worth = 1.0, seconds, reading, 0.0
        if isinstance(state, list) and len(state) == len(self.state()) and min(state) >= 0.0:
            self.tokens, self.seconds, self.reading, self.worth = state
        self.credit, self.tells = 0.0, False
        self.n_replies = 0 if self.worth == 0.0 else round(1 / RATE)  # that ``worth`` is from
        self._n_read = 0 if self.worth == 0.0 else _MOST_READ  # tokens that ``reading`` is from

    def state(self) -> list[float]:
        return [self.tokens, self.seconds, self.reading, self.worth]

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
        if n_read >= SIZES[-1]:
            self._n_read = min(self._n_read + n_read, _MOST_READ)
            self.reading += (max(0.0, seconds - self.seconds) - reading) / max(self._n_read, n_read)
        elif self.seconds:
            seconds = min(max(0.0, seconds - reading), 3.0 * self.seconds)
            self.seconds += RATE * (seconds - self.seconds)
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
        self._n_seen = 0  # tokens of the text when it was last considered, at first of the prompt
        self._worth = 0.0  # seconds that asks would have gained in this text so far
        self._gain = 0.0  # seconds that an ask is expected to gain in this step
        self._follows = False  # whether it was asked and has seen every step since

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts."""
        self._n_seen, self._worth, self._follows = len(prompt), 0.0, False
        self.drafter.begin(prompt)

    def end(self, tokens: Sequence[int]) -> None:
        """The text has ended."""
        asks = self.asks
        asks.n_replies += 1
        asks.worth += max(RATE, 1 / asks.n_replies) * (self._worth - asks.worth)
        self.drafter.end(tokens)

    def is_worth_asking(
        self,
        tokens: Sequence[int],
        prices: Prices,
        spare: float,
        left: float = 1.0,
        drafted: float = 0.0,
    ) -> bool:
        """Whether to ask it after ``tokens``.

        What it has not read of the text is read, after the first token, if what asks gain in the
        rest of the reply will probably pay for it: as much as usual, or as much again as so far.

        spare  seconds that a try may take; ``left`` and ``drafted`` as in ``Asks.gain``
        """
        asks = self.asks
        promise = self.drafter.promise(tokens)
        if promise is not None:
            asks.tells = True
            return prices.pay(left * promise)
        reading = asks.reading * self.drafter.n_unread(tokens)
        gain = asks.gain(prices.plain, left, drafted) - (0.0 if drafted else prices.change)
        self._gain = gain
        if gain <= 0.0:  # a try; not where the other sources' drafts would hide what it is worth
            return left > 0.5 and asks.seconds + reading <= min(asks.credit, spare)
        if self._n_seen < len(tokens):  # an ask would have brought several tokens
            self._n_seen = len(tokens)
            self._worth += gain / (1.0 + asks.tokens)
        return max(self._worth, asks.worth - self._worth) >= reading if self._worth else not reading

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        """Add its drafts to ``tree``, which has no others."""
        asks, self._n_read = self.asks, self.drafter.n_unread(tokens)
        if self._gain <= 0.0:  # the other texts of the step need not try it
            asks.credit -= asks.seconds + asks.reading * self._n_read
        else:
            self._worth += self._gain * asks.tokens / (1.0 + asks.tokens)
        start = own_time.now()
        yield from drafted(self.name, self.drafter, tokens, tree, budget)
        self._follows = True
        self.seconds = own_time.now() - start

    def observe(self, step: Step) -> None:
        """Pass on a step, whether or not it was asked in it."""
        if self._follows:
            start = own_time.now()
            self.drafter.observe(step)
            self.seconds += own_time.now() - start

    def skip(self, steps: PlainSteps) -> None:
        """There were steps in which it was not asked."""
        self._follows = False
        self.drafter.observe_plain(steps)

    def learn(self, accepted: Container[int], row: float, rest: float) -> None:
        """Learn from a step in which it was asked, whose ``accepted`` nodes are given.

        row   seconds of a row
        rest  its share of the seconds besides decoding and drafting
        """
        n_accepted = sum([node in accepted for node in self.nodes])
        spent = self.seconds + rest + row * len(self.nodes)
        self.asks.learn(n_accepted, spent, self._n_read)
