"""auto: every source at hand proposes, measured cost decides.

The sources, each a drafter of its own, grow one wide tree and say how likely each node is to hold.
``policy.choose`` says which of them make the most expected tokens per second, given what a batch of
so many rows costs here, and only these are kept. A source that has cost more than it gave rests for
a while, so that a text nobody can predict is decoded at plain speed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from batching.cache import StateReader
from batching.errors import InvalidParameter
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.cost_curve import SIZES, CostModel, Decode
from speculation.auto.selection import ample_rows, choose
from speculation.drafter import (
    Drafter,
    Listener,
    Run,
    Silence,
    Step,
    listener_of,
    needs_hidden,
    needs_layers,
    reader_of,
)

SOURCES = (
    "prompt-lookup",
    "recycling",
    "lookahead",
    "draft",
    "medusa",
    "redrafter",
    "eagle",
    "eagle-3",
    "mtp",
    "dflash",
)
_FLOOR = 0.02  # path probability below which nothing is looked at, however cheap a row
# Drafts must beat plain decoding by so much at most: where rows are dear, so is the way back to it.
_MARGIN = 0.15
_MAX_BRANCHES = 63  # with sequence 0 as many as a context has without being made anew
_ALLOWANCE = 0.4  # steps' worth of time that a source may lose before it rests …
_CHEAP_ALLOWANCE = 2.0  # … if it is cheap: a copy may begin after some words of a reply's own
_UPKEEP = 0.008  # share of the time that a source which does not pay may take
_MOST_PATIENCE = 4  # a rest is longer by this at most, after tries that have not paid
_RATE = 1 / 16  # of the average overhead
_LEARNING_RATE = 0.05  # of what a source's word is worth beside others, as in ``estimates``
_MOST_LOG_ODDS = 4.0
_WATCH_EVERY = 8  # steps after which the books are made up, where one cheap source is awake
_LOOP_SECONDS = 40e-6  # what a step takes besides drafting and decoding
# Share of a plain step that drafting takes at most for a source to be cheap: looking something up
# is, and no model, however small, since replies of a few tokens would pay for its tries.
_CHEAP = 0.12
_RESERVE = 8.0  # steps' worth of time beyond which what a source gained is not remembered


@dataclass(frozen=True)
class AutoParams:
    """What auto may do.

    rows_max  most rows of a batch
    sources   which may propose: all that are at hand, or names joined by +, such as
              prompt-lookup+recycling
    """

    rows_max: int = SIZES[-1]
    sources: str = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.rows_max <= SIZES[-1]:
            raise InvalidParameter(f"rows_max is {self.rows_max}; give 1 to {SIZES[-1]}")
        for name in self.named:
            if name not in SOURCES:
                raise InvalidParameter(
                    f"sources has {name!r}; give all, or some of {', '.join(SOURCES)} joined by +"
                )

    @property
    def named(self) -> list[str]:
        """The sources that were asked for by name."""
        return [] if self.sources == "all" else self.sources.split("+")

    def allows(self, source: str) -> bool:
        return self.sources == "all" or source in self.named


class Explorer(Protocol):
    """A drafter that finds its drafts in rows of their own, which are never accepted."""

    @property
    def window_rows(self) -> int:
        """How many rows those are."""
        ...

    @property
    def window_branches(self) -> int:
        """How many sequences they end."""
        ...

    def explore(self, tree: TokenTree) -> None:
        """Add them to a tree whose drafts are chosen."""
        ...


class Source:
    """A drafter among others, and whether it has been worth its time.

    Its account is in plain steps: a draft that held saves one less its row, and every microsecond
    of drafting costs a part of one. In debt it rests, for so long that the loss is less than 1% of
    the time; then it may try again, and rests twice as long should a dear one not pay then. Rows
    that did not hold are not its debt: which rows to decode is the policy's decision, and the
    estimates learn from them.

    In a single step it is asked only if what the sources before it leave open is worth its time: a
    draft model has nothing to add to a copy that is almost certain.
    """

    def __init__(self, name: str, drafter: Drafter, explorer: Explorer | None = None) -> None:
        """``explorer`` is the drafter once more, if it is one."""
        self.name = name
        self.drafter = drafter
        self.explorer = explorer
        self.window_seconds = 0.0  # what this step's rows of exploration cost
        self.account = 0.0
        self.seconds = 0.0  # spent in this step
        self._reading = 0.0  # spent on reading the text, and not yet charged
        self.has_drafted = False  # in this step
        self._usual = 0.0  # spent in a step in which it drafts, on average
        self._gained = 0.0  # saved in such a step, on average
        self._open = 0.0  # how likely all drafts before its own were to be wrong, on average
        self._log_odds = 0.0  # of its drafts, beyond what it says itself, where others draft too
        self._plain = 1.0  # cost of a plain step
        self.wakes_at = 0.0  # step, on the clock of the step before
        self._patience = 1  # how long it will rest next time, as a multiple
        self._prompt: Sequence[int] | None = None  # a text it has not begun with yet

    def wakes(self, now: int) -> bool:
        """Whether it would be awake if another text began after step ``now``."""
        return self.wakes_at <= now or self._is_cheap

    @property
    def needs_watching(self) -> bool:
        """Whether its time has to be taken in every step, also where it is the only one."""
        return self._prompt is not None or self.explorer is not None or not self._is_cheap

    @property
    def _is_cheap(self) -> bool:
        return self._usual <= _CHEAP * self._plain

    def is_worth(self, left: float) -> bool:
        """Whether it should draft where all drafts so far are wrong with probability ``left``.

        What it saves is taken to be in proportion to that. One that does not pay for itself may
        still show in a step that is wholly its own that it has become better.
        """
        worth = max(self._gained / self._open, self._usual) if self._open else math.inf
        return left * worth >= self._usual

    def likely(self, prob: float) -> float:
        """How likely a draft is to hold that it gives ``prob``, in the steps in which it is asked.

        It counts in all steps. Asked where others know nothing, it knows less than it does on the
        whole.
        """
        if not 0.0 < prob < 1.0:
            return prob
        return 1.0 / (1.0 + (1.0 - prob) / prob * math.exp(-self._log_odds))

    def learn(self, prob: float, *, held: bool) -> None:
        """One of its drafts, that was taken to hold with ``prob``, came to be checked."""
        change = _LEARNING_RATE * (held - prob)
        self._log_odds = max(-_MOST_LOG_ODDS, min(_MOST_LOG_ODDS, self._log_odds + change))

    def begin(self, prompt: Sequence[int], now: int) -> None:
        """Another text, after step ``now``: a new chance, if trying costs little."""
        if self._is_cheap:
            self.wakes_at = self.account = 0.0
        self._prompt = prompt
        if self.wakes_at <= now:
            seconds = self._catch_up()
            if not self._is_cheap:  # what is may look at every text anew, however long
                self._reading = seconds

    def draft(self, tokens: Sequence[int], tree: TokenTree, left: float = 1.0) -> None:
        """Add its drafts to ``tree``, if that is worth its time; see ``is_worth``."""
        self.seconds = 0.0
        self.has_drafted = self.is_worth(left)
        if self.has_drafted:
            if self._prompt is not None:
                self._reading = self._catch_up()
            start = perf_counter()
            self.drafter.draft(tokens, tree)
            self.seconds = perf_counter() - start
            self._open += _RATE * (left - self._open)

    def observe(self, step: Step, gain: float, plain: float, now: int, n_steps: int = 1) -> None:
        """``gain`` is what its drafts saved in this and the ``n_steps - 1`` steps before, and
        ``plain`` a plain step's cost, in seconds; ``now`` counts the steps."""
        if self._prompt is not None:  # it has not begun with this text
            return
        start = perf_counter()
        self.drafter.observe(step)
        self.seconds += perf_counter() - start
        # A step in which the system did something else is not the source's fault.
        usual = self._usual or self.seconds
        spent = min(self.seconds, 3 * usual)
        if self.has_drafted:
            self._usual = usual + _RATE * (spent - usual)
            self._gained += _RATE * (gain - self._gained)
        self._plain = plain
        balance = gain - n_steps * spent - self.window_seconds - self._reading
        account = self.account + balance / plain
        self.window_seconds = self._reading = 0.0
        is_cheap = self._is_cheap
        allowance = _CHEAP_ALLOWANCE if is_cheap else _ALLOWANCE
        if account > 0.0:
            self._patience = 1
        elif account < -allowance:
            self.wakes_at = now - self._patience * account / _UPKEEP
            if not is_cheap:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            account = -0.5 * allowance  # it wakes on probation
        self.account = min(account, _RESERVE)

    def _catch_up(self) -> float:
        """Begin with the text that it has not begun with yet; what that took."""
        assert self._prompt is not None
        start = perf_counter()
        self.drafter.begin(self._prompt)
        self._prompt = None
        return perf_counter() - start


class Auto:
    """All sources grow the tree, and what is not worth its row is taken out again.

    Right after a decode every piece of code is dear, so where one cheap source is awake its time is
    taken, and what steps cost and yielded is made up, in one step out of some.
    """

    def __init__(self, params: AutoParams, sources: Sequence[Source], cost: CostModel) -> None:
        self.params = params
        self.sources = list(sources)
        self.cost = cost
        share = max(cost.curve(0).row_share, _FLOOR)
        # Leaves exclude each other, so no more of them than 1 / floor can be worth a row.
        explored = sum(s.explorer.window_branches for s in sources if s.explorer is not None)
        self._max_leaves = max(2, min(_MAX_BRANCHES - explored, math.ceil(1 / share)))
        self.n_branches = self._max_leaves + explored
        self.needs_hidden = any(needs_hidden(source.drafter) for source in sources)
        self.needs_layers = needs_layers([source.drafter for source in sources])
        self._n_past = 0
        self._curve = cost.curve(0)
        self._table: list[float] = []  # of the curve, when the next was found for it
        self._ample = 0
        self._overhead = _LOOP_SECONDS  # what a step takes besides the decode, on average
        self._thought = 0.0  # time spent in this step
        self._awake: list[Source] = []  # this step's sources
        self._now = 0  # steps so far
        self._changes_at = 0.0  # the step at which another may be awake
        self._watches_at = 0  # the step at which the books are made up next …
        self._is_watching = False  # … which is this one
        self._decodes: list[Decode] = []  # since then …
        self._n_accepted: list[int] = []  # … and what became of their drafts
        self._n_asked = 0  # … and in how many of these steps sources were asked
        # Rows of the decode before; 0 where it had the prompt's as well, None where there is none.
        self._last_rows: int | None = None

    @property
    def reader(self) -> StateReader | None:
        """What reads the states of a prompt for the sources that will draft."""
        return reader_of([source.drafter for source in self.sources if source.wakes(self._now)])

    def begin(self, prompt: Sequence[int]) -> None:
        self._settle()
        self.cost.begin()
        self._last_rows = None
        for source in self.sources:
            source.begin(prompt, self._now)
        self._changes_at = self._now

    def silence(self, tokens: Sequence[int]) -> Silence | None:
        """All sources rest, or one that is only looked up has nothing to look up."""
        left = self._changes_at - self._now
        if left <= 0:
            return None
        n_steps = NO_LIMIT if left == math.inf else math.ceil(left)
        self._n_past = len(tokens) - 1
        if not self._awake:
            return Silence(None, n_steps)
        if self._now >= self._watches_at:
            return None
        listener = self._listener
        found = listener.silence(tokens) if listener else None
        return found and Silence(found.until, n_steps)

    def observe_run(self, run: Run) -> None:
        """No step of a run is one in which the books are made up, and none is a source's debt."""
        for n_past, seconds in enumerate(run.seconds, self._n_past):
            self._decodes.append((1, n_past, seconds))
        n = len(run.tokens)
        self._n_accepted += [0] * n
        self._last_rows = 1
        self._now += n
        self._watches_at += n
        if not self._awake:
            self._settle()
        elif listener := self._listener:
            listener.observe_run(run)

    @property
    def _listener(self) -> Listener | None:
        """The only source that is awake, if it knows when it is silent."""
        return listener_of([source.drafter for source in self._awake])

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        self._n_past = len(tokens) - 1
        self._curve = curve = self.cost.curve(self._n_past)
        if self._now >= self._changes_at:
            self._look_who_is_awake()
        awake = self._awake
        if not awake:
            return
        self._is_watching = self._now >= self._watches_at
        start = perf_counter() if self._is_watching else 0.0
        room = tree.max_nodes
        if curve.table is not self._table:
            self._table = curve.table
            self._ample = ample_rows(curve.table, self._overhead)
        most = self._ample + 8 * (len(awake) - 1)  # a chain, and what others put beside it
        tree.max_nodes = min(room, most)
        tree.floor = max(curve.row_share, _FLOOR)
        if not self._is_watching:
            awake[0].drafter.draft(tokens, tree)
            tree.max_nodes = room
            if len(tree) > 1:
                self._keep_best(tree, (len(tree),))
            return
        ends = []  # first node after those of each source, in order
        taken: dict[int, float] = {}  # by node: how likely one of the drafts below it is to hold
        for source in awake:
            first = len(tree)
            source.draft(tokens, tree, 1.0 - taken.get(0, 0.0))
            ends.append(len(tree))
            if len(awake) > 1:
                _weigh(tree, first, source, taken)
        tree.max_nodes = room
        if len(tree) > 1:
            self._keep_best(tree, ends)
        for source in awake:
            if source.explorer is not None:
                n = len(tree)
                source.explorer.explore(tree)
                source.window_seconds = curve.at(len(tree)) - curve.at(n)
        self._thought = perf_counter() - start

    def _look_who_is_awake(self) -> None:
        now = self._now
        self._awake = [source for source in self.sources if source.wakes_at <= now]
        asleep = [source.wakes_at for source in self.sources if source.wakes_at > now]
        self._changes_at = min(asleep, default=math.inf)
        self._settle()
        self._watches_at = now
        self._is_watching = False

    def _keep_best(self, tree: TokenTree, ends: Sequence[int]) -> None:
        """Leave in ``tree`` what is worth decoding, and note which source drafted it.

        ``ends[i]`` is the first node after those of the i-th source that is awake.
        """
        chosen = choose(
            tree,
            self._curve.table,
            last_rows=self._last_rows or 0,
            switch_seconds=max(0.0, self._curve.switch_seconds),
            overhead_seconds=self._overhead,
            margin=min(_MARGIN, 0.5 * self._curve.row_share),
            max_nodes=self.params.rows_max - 1,
            max_leaves=self._max_leaves,
        )
        tree.keep(chosen)
        if chosen:
            names = [source.name for source in self._awake]
            if chosen[-1] < ends[0]:
                tree.sources = dict.fromkeys(range(1, len(chosen) + 1), names[0])
            else:
                by = [names[bisect_right(ends, node)] for node in chosen]
                tree.sources = dict(enumerate(by, 1))

    def observe(self, step: Step) -> None:
        n_rows = len(step.tree)
        self._decodes.append((n_rows, self._n_past, step.decode_seconds))
        self._n_accepted.append(len(step.path) - 1)
        self._n_asked += 1
        self._last_rows = 0 if self._last_rows is None else n_rows
        self._now += 1
        if self._is_watching:
            self._make_up(step)
        elif self._awake:
            self._awake[0].drafter.observe(step)
        elif len(self._decodes) >= _WATCH_EVERY:
            self._settle()

    def _make_up(self, step: Step) -> None:
        """Tell the sources of this step, and what they are worth since the books were made up."""
        start = perf_counter()
        curve, awake, now = self._curve, self._awake, self._now
        plain = curve.at(1)
        saved = 0.0  # by drafts that held
        for (n_rows, _, _), n_accepted in zip(self._decodes, self._n_accepted, strict=True):
            if n_accepted:
                saved += n_accepted * max(0.0, plain - (curve.at(n_rows) - plain) / (n_rows - 1))
        if len(awake) == 1:
            awake[0].observe(step, saved, plain, now, self._n_asked)
        else:  # and then this is the only step
            self._learn(step)
            drafted_by = [step.tree.sources[node] for node in step.path[1:]]
            share = saved / max(1, len(drafted_by))
            for source in awake:
                source.observe(step, drafted_by.count(source.name) * share, plain, now)
        if any(source.wakes_at > now for source in awake):
            self._changes_at = now
        elif len(awake) == 1 and not awake[0].needs_watching:
            self._watches_at = now + _WATCH_EVERY - 1
        self._settle()
        spent = self._thought + perf_counter() - start + _LOOP_SECONDS
        self._overhead += _RATE * (spent - self._overhead)

    def _settle(self) -> None:
        """Have the cost model follow what was decoded."""
        self.cost.follow(self._decodes)
        self._decodes.clear()
        self._n_accepted.clear()
        self._n_asked = 0

    def _learn(self, step: Step) -> None:
        """Tell the sources of their drafts that were checked: those below an accepted node."""
        tree, accepted = step.tree, set(step.path)
        sources = {source.name: source for source in self._awake}
        for node, name in tree.sources.items():
            if tree.parents[node] in accepted:
                sources[name].learn(tree.probs[node], held=node in accepted)


def _weigh(tree: TokenTree, first: int, source: Source, taken: dict[int, float]) -> None:
    """Say how likely the nodes from ``first`` on are to hold, beside those of the sources before.

    A source's own drafts below a node exclude each other already; it does not know of the others.
    ``taken`` is how likely those are to hold, by their parent, and gets the new ones as well.
    """
    fresh: dict[int, float] = {}
    for node in range(first, len(tree)):
        parent = tree.parents[node]
        prob = source.likely(tree.probs[node]) * max(0.0, 1.0 - taken.get(parent, 0.0))
        tree.probs[node] = prob
        fresh[parent] = fresh.get(parent, 0.0) + prob
    for parent, prob in fresh.items():
        taken[parent] = taken.get(parent, 0.0) + prob
