"""auto: every source at hand drafts, and the measured cost decides.

The sources, each a drafter of its own, grow one wide tree and say how likely each node is to be
accepted. ``selection.select`` finds the nodes with the most expected tokens per second, given what
a batch of so many rows costs here, and only these are decoded. A source that has cost more than it
gained is disabled for a while, so that a text nobody can predict is decoded at plain speed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from batching.errors import InvalidParameter
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.cost_curve import SIZES, CostModel, Decode
from speculation.auto.selection import max_useful_rows, select
from speculation.auto.source import RATE, Source
from speculation.drafter import (
    DraftBudget,
    Drafter,
    IdleHint,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.resources import Resources

_MIN_PATH_PROB = 0.02  # path probability below which no node is drafted, however cheap a row
# Drafts must beat plain decoding by so much at most: where rows are dear, so is the way back to it.
_MARGIN = 0.15
_MAX_BRANCHES = 63  # with sequence 0 as many as a context has without being made anew
_TIME_EVERY = 8  # steps between updates of the statistics, where one cheap source is enabled
_LOOP_SECONDS = 40e-6  # what a step takes besides drafting and decoding


@dataclass(frozen=True)
class AutoParams:
    """What auto may do.

    rows_max  most rows of a batch
    sources   which may draft: all that are at hand, or names joined by +, such as
              prompt-lookup+recycling
    """

    rows_max: int = SIZES[-1]
    sources: str = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.rows_max <= SIZES[-1]:
            raise InvalidParameter(f"rows_max is {self.rows_max}; give 1 to {SIZES[-1]}")

    @property
    def named(self) -> list[str]:
        """The sources that were asked for by name."""
        return [] if self.sources == "all" else self.sources.split("+")

    def allows(self, source: str) -> bool:
        return self.sources == "all" or source in self.named


def auto_spec(methods: Callable[[], Iterable[MethodSpec]]) -> MethodSpec:
    """The method ``auto`` over the sources among ``methods``, asked in that order."""
    return MethodSpec(
        name="auto",
        title="Auto",
        params=AutoParams,
        make=partial(_make, methods),
        check=partial(_check_sources, methods),
    )


def _check_sources(methods: Callable[[], Iterable[MethodSpec]], params: AutoParams) -> None:
    known = [spec.source_name for spec in methods() if spec.as_source is not None]
    for name in params.named:
        if name not in known:
            raise InvalidParameter(
                f"sources has {name!r}; give all, or some of {', '.join(known)} joined by +"
            )


def _make(
    methods: Callable[[], Iterable[MethodSpec]], params: AutoParams, resources: Resources
) -> Auto | None:
    """The same drafter for every text, so that what it learnt is kept; None for a model that cannot
    drop drafts, which is then decoded plainly."""
    if not resources.n_rewind:
        return None

    def make() -> Auto:
        sources = []
        for spec in methods():
            join, name = spec.as_source, spec.source_name
            if join is None or not params.allows(name):
                continue
            joined = join.params(resources)
            if joined is None:
                if name in params.named:  # by name: say what is missing, if anything is
                    spec.make(spec.params(), resources)
                continue
            drafter = spec.make(joined, resources)
            if drafter is not None:
                sources.append(Source(name, drafter))
        return Auto(params, sources, resources.cost)

    return resources.keep(params, make)


class Auto(Drafter):
    """All sources grow the tree, and what is not worth its row is taken out again.

    Right after a decode any Python code runs slowly, so where one cheap source is enabled, its time
    is taken, and the statistics updated, only once in a few steps.
    """

    def __init__(self, params: AutoParams, sources: Sequence[Source], cost: CostModel) -> None:
        self.params = params
        self.sources = list(sources)
        self.cost = cost
        share = max(cost.curve(0).row_share, _MIN_PATH_PROB)
        # Leaves exclude each other, so no more than 1 / share of them can be worth a row.
        explored = sum(source.drafter.explored_branches for source in sources)
        self._max_leaves = max(2, min(_MAX_BRANCHES - explored, math.ceil(1 / share)))
        self._n_branches = self._max_leaves + explored
        self._n_past = 0
        self._curve = cost.curve(0)
        self._table: list[float] = []  # of the curve for which _max_rows was found
        self._max_rows = 0
        self._overhead = _LOOP_SECONDS  # what a step takes besides the decode, on average
        self._thought = 0.0  # time spent in this step
        self._enabled: list[Source] = []  # this step's sources
        self._now = 0  # steps so far
        self._changes_at = 0.0  # the step at which another source may be enabled
        self._timed_at = 0  # the next timed step, in which statistics are updated …
        self._is_timed = False  # … and whether this is one
        self._decodes: list[Decode] = []  # since then …
        self._n_accepted: list[int] = []  # … and how many of their drafts were accepted
        self._n_asked = 0  # … and in how many of these steps sources were asked
        # Rows of the decode before; 0 where it had the prompt's as well, None where there is none.
        self._last_rows: int | None = None

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """What all sources need. Only those that will draft in the next text read its prompt."""
        every = [source.drafter.requires for source in self.sources]
        readers = [
            source.drafter.requires
            for source in self.sources
            if source.is_enabled_for_text(self._now)
        ]
        return replace(
            Requirements.of_all(every),
            prompt_reader=Requirements.of_all(readers).prompt_reader,
            rows=1,
            branches=self._n_branches,
        )

    def begin(self, prompt: Sequence[int]) -> None:
        self._settle()
        self.cost.begin()
        self._last_rows = None
        for source in self.sources:
            source.begin(prompt, self._now)
        self._changes_at = self._now

    def idle(self, tokens: Sequence[int]) -> IdleHint | None:
        """All sources are disabled, or the only one has nothing to look up."""
        left = self._changes_at - self._now
        if left <= 0:
            return None
        n_steps = NO_LIMIT if left == math.inf else math.ceil(left)
        self._n_past = len(tokens) - 1
        if not self._enabled:
            return IdleHint(None, n_steps)
        if self._now >= self._timed_at or len(self._enabled) > 1:
            return None
        found = self._enabled[0].drafter.idle(tokens)
        return found and IdleHint(found.until, n_steps)

    def observe_plain(self, steps: PlainSteps) -> None:
        """Count plain steps. None of them is timed, and none is charged to a source."""
        for n_past, seconds in enumerate(steps.seconds, self._n_past):
            self._decodes.append((1, n_past, seconds))
        n = len(steps.tokens)
        self._n_accepted += [0] * n
        self._last_rows = 1
        self._now += n
        self._timed_at += n
        if not self._enabled:
            self._settle()
        elif len(self._enabled) == 1:
            self._enabled[0].drafter.observe_plain(steps)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._n_past = len(tokens) - 1
        self._curve = curve = self.cost.curve(self._n_past)
        if self._now >= self._changes_at:
            self._look_for_enabled()
        enabled = self._enabled
        if not enabled:
            return
        self._is_timed = self._now >= self._timed_at
        start = perf_counter() if self._is_timed else 0.0
        if curve.table is not self._table:
            self._table = curve.table
            self._max_rows = max_useful_rows(curve.table, self._overhead)
        most = self._max_rows + 8 * (len(enabled) - 1)  # a chain, and what others put beside it
        shared = DraftBudget(
            min(budget.max_nodes, most - 1),
            budget.max_depth,
            min(budget.max_leaves, self._max_leaves),
            max(curve.row_share, _MIN_PATH_PROB),
            budget.chain_only,
        )
        if not self._is_timed:
            enabled[0].drafter.draft(tokens, tree, shared)
            if len(tree) > 1:
                self._keep_best(tree, shared, (len(tree),))
            return
        ends = []  # first node after those of each source, in order
        taken: dict[
            int, float
        ] = {}  # by node: how likely one of the drafts below is to be accepted
        for source in enabled:
            first = len(tree)
            source.draft(tokens, tree, shared, 1.0 - taken.get(0, 0.0))
            ends.append(len(tree))
            if len(enabled) > 1:
                _calibrate(tree, first, source, taken)
        if len(tree) > 1:
            self._keep_best(tree, shared, ends)
        for source in enabled:
            if source.explores:
                n = len(tree)
                source.drafter.explore(tree, budget)
                source.explored_seconds = curve.at(len(tree)) - curve.at(n)
        self._thought = perf_counter() - start

    def _look_for_enabled(self) -> None:
        now = self._now
        self._enabled = [source for source in self.sources if source.enabled_at <= now]
        disabled = [source.enabled_at for source in self.sources if source.enabled_at > now]
        self._changes_at = min(disabled, default=math.inf)
        self._settle()
        self._timed_at = now
        self._is_timed = False

    def _keep_best(self, tree: TokenTree, budget: DraftBudget, ends: Sequence[int]) -> None:
        """Leave in ``tree`` what is worth decoding, and note which source drafted it.

        ``ends[i]`` is the first node after those of the i-th enabled source.
        """
        chosen = select(
            tree,
            budget,
            self._curve.table[: self.params.rows_max + 1],
            last_rows=self._last_rows or 0,
            switch_seconds=max(0.0, self._curve.switch_seconds),
            overhead_seconds=self._overhead,
            margin=min(_MARGIN, 0.5 * self._curve.row_share),
        )
        tree.keep(chosen)
        if chosen:
            names = [source.name for source in self._enabled]
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
        if self._is_timed:
            self._update(step)
        elif self._enabled:
            self._enabled[0].drafter.observe(step)
        elif len(self._decodes) >= _TIME_EVERY:
            self._settle()

    def _update(self, step: Step) -> None:
        """Show the sources this step, and what they are worth since the last timed one."""
        start = perf_counter()
        curve, enabled, now = self._curve, self._enabled, self._now
        plain = curve.at(1)
        saved = 0.0  # by accepted drafts
        for (n_rows, _, _), n_accepted in zip(self._decodes, self._n_accepted, strict=True):
            if n_accepted:
                saved += n_accepted * max(0.0, plain - (curve.at(n_rows) - plain) / (n_rows - 1))
        if len(enabled) == 1:
            enabled[0].observe(step, saved, plain, now, self._n_asked)
        else:  # and then this is the only step since
            self._learn(step)
            drafted_by = [step.tree.sources[node] for node in step.path[1:]]
            share = saved / max(1, len(drafted_by))
            for source in enabled:
                source.observe(step, drafted_by.count(source.name) * share, plain, now)
        if any(source.enabled_at > now for source in enabled):
            self._changes_at = now
        elif len(enabled) == 1 and not enabled[0].needs_timing:
            self._timed_at = now + _TIME_EVERY - 1
        self._settle()
        spent = self._thought + perf_counter() - start + _LOOP_SECONDS
        self._overhead += RATE * (spent - self._overhead)

    def _settle(self) -> None:
        """Have the cost model follow what was decoded."""
        self.cost.follow(self._decodes)
        self._decodes.clear()
        self._n_accepted.clear()
        self._n_asked = 0

    def _learn(self, step: Step) -> None:
        """Calibrate the sources by their verified drafts: those below an accepted node."""
        tree, accepted = step.tree, set(step.path)
        sources = {source.name: source for source in self._enabled}
        for node, name in tree.sources.items():
            if tree.parents[node] in accepted:
                sources[name].learn(tree.probs[node], accepted=node in accepted)


def _calibrate(tree: TokenTree, first: int, source: Source, taken: dict[int, float]) -> None:
    """Make the probabilities of the nodes from ``first`` on those they have beside the others.

    A source's own drafts below a node exclude each other already; it does not know of the others.
    ``taken`` is how likely those are to be accepted, by parent, and gets the new ones as well.
    """
    fresh: dict[int, float] = {}
    for node in range(first, len(tree)):
        parent = tree.parents[node]
        prob = source.calibrated(tree.probs[node]) * max(0.0, 1.0 - taken.get(parent, 0.0))
        tree.probs[node] = prob
        fresh[parent] = fresh.get(parent, 0.0) + prob
    for parent, prob in fresh.items():
        taken[parent] = taken.get(parent, 0.0) + prob
