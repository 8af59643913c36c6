"""The method ``auto``: combines all available drafters and selects drafts by measured cost.

The drafters ("sources") grow one wide tree, each node with its probability of acceptance.
``selection.select`` picks the nodes with the most expected tokens per second, given the measured
cost of a batch, and only these are decoded. A source that costs more than it gains is disabled for
a cooldown, so an unpredictable text is decoded at plain speed.
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

_MIN_PATH_PROB = 0.02  # nodes below this path probability are never drafted
# The most by which drafts must beat plain decoding. The margin grows with the cost of a row, as
# does the cost of a wrong decision to draft.
_MAX_MARGIN = 0.15
_MAX_BRANCHES = 63  # with sequence 0, the default number of sequences in a context
_TIME_EVERY = 8  # steps between updates of the statistics while one cheap source is enabled
_LOOP_SECONDS = 40e-6  # time of a step besides drafting and decoding


@dataclass(frozen=True)
class AutoParams:
    """Limits for auto.

    rows_max  most rows in a batch
    sources   allowed sources: all that are available, or names joined by +, such as
              prompt-lookup+recycling
    """

    rows_max: int = SIZES[-1]
    sources: str = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.rows_max <= SIZES[-1]:
            raise InvalidParameter(f"rows_max is {self.rows_max}; give 1 to {SIZES[-1]}")

    @property
    def named(self) -> list[str]:
        """The sources requested by name."""
        return [] if self.sources == "all" else self.sources.split("+")

    def allows(self, source: str) -> bool:
        return self.sources == "all" or source in self.named


def auto_spec(methods: Callable[[], Iterable[MethodSpec]]) -> MethodSpec:
    """The method ``auto``. Its sources are those among ``methods``, which draft in that order."""
    return MethodSpec(
        name="auto",
        title="Auto",
        params=AutoParams,
        make=partial(_make, methods),
        check=partial(_check_sources, methods),
    )


def _check_sources(methods: Callable[[], Iterable[MethodSpec]], params: AutoParams) -> None:
    names = [spec.source_name for spec in methods() if spec.as_source is not None]
    for name in params.named:
        if name not in names:
            raise InvalidParameter(
                f"sources contains {name!r}; give all, or some of {', '.join(names)} joined by +"
            )


def _make(
    methods: Callable[[], Iterable[MethodSpec]], params: AutoParams, resources: Resources
) -> Auto | None:
    """One drafter shared by all texts, so its statistics persist.

    None, for plain decoding, if the model cannot roll back drafts.
    """
    if not resources.n_rewind:
        return None

    def make() -> Auto:
        sources = []
        for spec in methods():
            as_source, name = spec.as_source, spec.source_name
            if as_source is None or not params.allows(name):
                continue
            source_params = as_source.params(resources)
            if source_params is None:
                if name in params.named:  # raises an error if a resource is missing
                    spec.make(spec.params(), resources)
                continue
            drafter = spec.make(source_params, resources)
            if drafter is not None:
                sources.append(Source(name, drafter))
        return Auto(params, sources, resources.cost)

    return resources.keep(params, make)


class Auto(Drafter):
    """Lets all enabled sources grow the tree, then drops nodes not worth their row.

    Python code runs slowly right after a decode (cold caches). So while a single cheap source is
    enabled, only one step in eight is timed and updates the statistics.
    """

    def __init__(self, params: AutoParams, sources: Sequence[Source], cost: CostModel) -> None:
        self.params = params
        self.sources = list(sources)
        self.cost = cost
        share = max(cost.curve(0).row_share, _MIN_PATH_PROB)
        # Leaves are mutually exclusive, so at most 1 / share of them can be worth a row.
        explored = sum(source.drafter.explored_branches for source in sources)
        self._max_leaves = max(2, min(_MAX_BRANCHES - explored, math.ceil(1 / share)))
        self._n_branches = self._max_leaves + explored
        self._n_past = 0
        self._curve = cost.curve(0)
        self._table: list[float] = []  # the curve's table that _max_rows was computed from
        self._max_rows = 0
        self._overhead = _LOOP_SECONDS  # average time of a step besides the decode
        self._draft_seconds = 0.0  # of this step
        self._enabled: list[Source] = []
        self._now = 0  # steps so far
        self._recheck_at = 0.0  # step at which the next cooldown ends
        self._timed_at = 0  # the next timed step, which updates the statistics
        self._is_timed = False  # whether this step is timed
        # Since the last update: decodes, accepted drafts of each, and steps with drafting.
        self._decodes: list[Decode] = []
        self._n_accepted: list[int] = []
        self._n_drafting = 0
        # Rows of the last decode; 0 if it included prompt rows, None before a text's first.
        self._last_rows: int | None = None

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """The needs of all sources; only those enabled for the next text read its prompt."""
        requirements = [source.drafter.requires for source in self.sources]
        readers = [
            source.drafter.requires
            for source in self.sources
            if source.is_enabled_for_text(self._now)
        ]
        return replace(
            Requirements.of_all(requirements),
            prompt_reader=Requirements.of_all(readers).prompt_reader,
            rows=1,
            branches=self._n_branches,
        )

    def begin(self, prompt: Sequence[int]) -> None:
        self._update_cost()
        self.cost.begin()
        self._last_rows = None
        for source in self.sources:
            source.begin(prompt, self._now)
        self._recheck_at = self._now

    def idle(self, tokens: Sequence[int]) -> IdleHint | None:
        """Idle while all sources are disabled, or the only enabled one is idle."""
        remaining = self._recheck_at - self._now
        if remaining <= 0:
            return None
        n_steps = NO_LIMIT if remaining == math.inf else math.ceil(remaining)
        self._n_past = len(tokens) - 1
        if not self._enabled:
            return IdleHint(None, n_steps)
        if self._now >= self._timed_at or len(self._enabled) > 1:
            return None
        hint = self._enabled[0].drafter.idle(tokens)
        return hint and IdleHint(hint.until, n_steps)

    def observe_plain(self, steps: PlainSteps) -> None:
        """Count plain steps. They are not timed, and no source is charged for them."""
        for n_past, seconds in enumerate(steps.seconds, self._n_past):
            self._decodes.append((1, n_past, seconds))
        n = len(steps.tokens)
        self._n_accepted += [0] * n
        self._last_rows = 1
        self._now += n
        self._timed_at += n
        if not self._enabled:
            self._update_cost()
        elif len(self._enabled) == 1:
            self._enabled[0].drafter.observe_plain(steps)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._n_past = len(tokens) - 1
        self._curve = curve = self.cost.curve(self._n_past)
        if self._now >= self._recheck_at:
            self._update_enabled()
        enabled = self._enabled
        if not enabled:
            return
        self._is_timed = self._now >= self._timed_at
        start = perf_counter() if self._is_timed else 0.0
        if curve.table is not self._table:
            self._table = curve.table
            self._max_rows = max_useful_rows(curve.table, self._overhead)
        max_rows = self._max_rows + 8 * (len(enabled) - 1)  # a chain, and branches of the others
        shared = DraftBudget(
            min(budget.max_nodes, max_rows - 1),
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
        covered: dict[int, float] = {}  # node -> probability that one of its children is accepted
        for source in enabled:
            first = len(tree)
            source.draft(tokens, tree, shared, 1.0 - covered.get(0, 0.0))
            ends.append(len(tree))
            if len(enabled) > 1:
                _calibrate(tree, first, source, covered)
        if len(tree) > 1:
            self._keep_best(tree, shared, ends)
        for source in enabled:
            if source.explores:
                n = len(tree)
                source.drafter.explore(tree, budget)
                source.explored_seconds = curve.at(len(tree)) - curve.at(n)
        self._draft_seconds = perf_counter() - start

    def _update_enabled(self) -> None:
        now = self._now
        self._enabled = [source for source in self.sources if source.enabled_at <= now]
        disabled = [source.enabled_at for source in self.sources if source.enabled_at > now]
        self._recheck_at = min(disabled, default=math.inf)
        self._update_cost()
        self._timed_at = now
        self._is_timed = False

    def _keep_best(self, tree: TokenTree, budget: DraftBudget, ends: Sequence[int]) -> None:
        """Keep only the nodes worth decoding, and record their sources.

        ``ends[i]`` is the first node after those of the i-th enabled source.
        """
        chosen = select(
            tree,
            budget,
            self._curve.table[: self.params.rows_max + 1],
            last_rows=self._last_rows or 0,
            switch_seconds=max(0.0, self._curve.switch_seconds),
            overhead_seconds=self._overhead,
            margin=min(_MAX_MARGIN, 0.5 * self._curve.row_share),
        )
        tree.keep(chosen)
        if chosen:
            names = [source.name for source in self._enabled]
            if chosen[-1] < ends[0]:
                tree.sources = dict.fromkeys(range(1, len(chosen) + 1), names[0])
            else:
                drafted_by = [names[bisect_right(ends, node)] for node in chosen]
                tree.sources = dict(enumerate(drafted_by, 1))

    def observe(self, step: Step) -> None:
        n_rows = len(step.tree)
        self._decodes.append((n_rows, self._n_past, step.decode_seconds))
        self._n_accepted.append(len(step.path) - 1)
        self._n_drafting += 1
        self._last_rows = 0 if self._last_rows is None else n_rows
        self._now += 1
        if self._is_timed:
            self._update(step)
        elif self._enabled:
            self._enabled[0].drafter.observe(step)
        elif len(self._decodes) >= _TIME_EVERY:
            self._update_cost()

    def _update(self, step: Step) -> None:
        """Pass a timed step to the sources, with the time they saved since the last one."""
        start = perf_counter()
        curve, enabled, now = self._curve, self._enabled, self._now
        plain = curve.at(1)
        saved = 0.0  # seconds
        for (n_rows, _, _), n_accepted in zip(self._decodes, self._n_accepted, strict=True):
            if n_accepted:
                saved += n_accepted * max(0.0, plain - (curve.at(n_rows) - plain) / (n_rows - 1))
        if len(enabled) == 1:
            enabled[0].observe(step, saved, plain, now, self._n_drafting)
        else:  # every step is timed
            self._calibrate_sources(step)
            drafted_by = [step.tree.sources[node] for node in step.path[1:]]
            share = saved / max(1, len(drafted_by))
            for source in enabled:
                source.observe(step, drafted_by.count(source.name) * share, plain, now)
        if any(source.enabled_at > now for source in enabled):
            self._recheck_at = now
        elif len(enabled) == 1 and not enabled[0].needs_timing:
            self._timed_at = now + _TIME_EVERY - 1
        self._update_cost()
        spent = self._draft_seconds + perf_counter() - start + _LOOP_SECONDS
        self._overhead += RATE * (spent - self._overhead)

    def _update_cost(self) -> None:
        """Update the cost model with the decodes since the last update."""
        self.cost.follow(self._decodes)
        self._decodes.clear()
        self._n_accepted.clear()
        self._n_drafting = 0

    def _calibrate_sources(self, step: Step) -> None:
        """Calibrate each source on its verified drafts: those whose parent was accepted."""
        tree, accepted = step.tree, set(step.path)
        sources = {source.name: source for source in self._enabled}
        for node, name in tree.sources.items():
            if tree.parents[node] in accepted:
                sources[name].learn(tree.probs[node], accepted=node in accepted)


def _calibrate(tree: TokenTree, first: int, source: Source, covered: dict[int, float]) -> None:
    """Calibrate the source's nodes, those from ``first`` on, given the earlier sources' nodes.

    Siblings from one source are mutually exclusive already, but a source does not know of the
    others' drafts. ``covered`` is, by parent, the probability that one of the drafts below it is
    accepted; the new nodes are added to it.
    """
    added: dict[int, float] = {}
    for node in range(first, len(tree)):
        parent = tree.parents[node]
        prob = source.calibrated(tree.probs[node]) * max(0.0, 1.0 - covered.get(parent, 0.0))
        tree.probs[node] = prob
        added[parent] = added.get(parent, 0.0) + prob
    for parent, prob in added.items():
        covered[parent] = covered.get(parent, 0.0) + prob
