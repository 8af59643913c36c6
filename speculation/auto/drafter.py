"""The method ``auto``: combines all available drafters and selects drafts by measured cost.

The drafters ("sources") grow one wide tree, each node with its probability of acceptance.
``selection.select`` picks the nodes with the most expected tokens per second, given the measured
cost of a batch, and only these are decoded. A source is asked only if what it is expected to add is
worth its time (``source``); if none is, the text is decoded in plain steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.auto.cost import SIZES, Cost
from speculation.auto.fusion import fuse
from speculation.auto.selection import select
from speculation.auto.source import Source
from speculation.drafter import (
    DraftBudget,
    Drafter,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.drafting.estimates import RATE
from speculation.resources import Resources

# Nodes below this path probability are never drafted. Where rows are nearly free, this bounds the
# time that Python takes for them.
_MIN_PATH_PROB = 0.05


@dataclass(frozen=True)
class AutoParams:
    """Limits for auto.

    rows_max  most rows in a batch
    sources   allowed sources: all that are available, or names joined by +, such as
              suffix+recycling
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
                source = Source(name, drafter, as_source.gains, resources.saved(name))
                resources.save(name, source.state)
                sources.append(source)
        return Auto(params, sources, resources.cost)

    return resources.keep(params, make)


class Auto(Drafter):
    """Lets the sources worth their time grow the tree, then drops nodes not worth their row."""

    def __init__(self, params: AutoParams, sources: Sequence[Source], cost: Cost) -> None:
        self.params = params
        self.sources = list(sources)
        self.cost = cost
        share = max(cost.curve(0).row_share, _MIN_PATH_PROB)
        # Leaves are mutually exclusive, so at most 1 / share of them can be worth a row.
        self._max_leaves = max(2, math.ceil(1 / share))
        self._curve = cost.curve(0)
        self._asked: list[Source] = []
        self._now = 0  # steps so far, except those of the present plain run
        self._n_tokens = 0  # of the text after those steps
        self._started = 0.0  # time when this step began
        self._overhead = 0.0  # average seconds of a step besides decoding and drafting
        # Rows of the last decode; 0 if it included prompt rows, None before a text's first.
        self._last_rows: int | None = None

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """The needs of all sources; only those with a gain read the next prompt's states."""
        every = Requirements.of_all(source.drafter.requires for source in self.sources)
        readers = [source.drafter.requires for source in self.sources if source.reads_prompt]
        prompt_reader = Requirements.of_all(readers).prompt_reader
        return replace(every, prompt_reader=prompt_reader, rows=1, branches=self._max_leaves)

    def begin(self, prompt: Sequence[int]) -> None:
        self.cost.begin()
        self._last_rows = None
        self._n_tokens = len(prompt)
        curve = self.cost.curve(len(prompt))
        row = curve.table[-1] / (len(curve.table) - 1)
        for source in self.sources:
            source.begin(prompt, row, curve.at(1))

    def end(self, tokens: Sequence[int]) -> None:
        for source in self.sources:
            source.drafter.end(tokens)

    def strength(self, tokens: Sequence[int]) -> int:
        """1 if a source is worth asking, else 0."""
        now, plain = self._now + len(tokens) - self._n_tokens, self._curve.table[1]
        for source in self.sources:
            if not source.is_idle(now) and source.strength(tokens, now, plain):
                return 1
        return 0

    def observe_plain(self, steps: PlainSteps) -> None:
        n = len(steps.tokens)
        self.cost.follow(1, self._n_tokens - 1, median(steps.seconds), n)
        self._last_rows = 1
        self._now += n
        self._n_tokens += n
        for source in self.sources:
            source.skip()
            source.drafter.observe_plain(steps)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._started = perf_counter()
        self._n_tokens = len(tokens)
        self._curve = curve = self.cost.curve(len(tokens) - 1)
        shared = DraftBudget(
            min(budget.max_nodes, self.params.rows_max - 1),
            budget.max_depth,
            min(budget.max_leaves, self._max_leaves),
            max(curve.row_share, _MIN_PATH_PROB),
            budget.chain_only,
        )
        self._asked = asked = []
        now, plain, left, drafted = self._now, curve.table[1], 1.0, 0.0
        for source in self.sources:
            if source.is_idle(now):
                continue
            if len(tree) > 1:
                path_probs = tree.path_probs()
                drafted = sum(path_probs) - 1.0
                firsts = [node for node, depth in enumerate(tree.depths) if depth == 1]
                left = 1.0 - sum([path_probs[node] for node in firsts])
            strength = source.strength(tokens, now, plain, left, drafted)
            if not strength:
                continue
            own = tree if len(tree) == 1 else TokenTree(tree.tokens[0])
            source.draft(tokens, own, shared, strength, left)
            source.nodes = range(1, len(own)) if own is tree else fuse(tree, own)
            asked.append(source)
        if len(tree) > 1:
            self._keep_best(tree, shared)

    def _keep_best(self, tree: TokenTree, budget: DraftBudget) -> None:
        """Keep only the nodes worth decoding, and record their sources."""
        curve = self._curve
        (chosen,) = select(
            [tree],
            [budget],
            curve.table[: self.params.rows_max + 1],
            last_rows=self._last_rows or 0,
            switch_seconds=curve.switch_seconds,
            overhead_seconds=self._overhead,
        )
        tree.keep(chosen)
        new = dict(zip(chosen, range(1, len(chosen) + 1), strict=True))
        for source in reversed(self._asked):  # a draft of several counts as the first one's
            source.nodes = [new[node] for node in source.nodes if node in new]
            tree.sources.update(dict.fromkeys(source.nodes, source.name))

    def observe(self, step: Step) -> None:
        curve, n_rows = self._curve, len(step.tree)
        self.cost.follow(n_rows, self._n_tokens - 1, step.decode_seconds)
        self._last_rows = 0 if self._last_rows is None else n_rows
        self._now += 1
        self._n_tokens += len(step.tokens)
        for source in self.sources:
            source.observe(step)
        asked = self._asked
        if not asked:
            return
        plain = curve.table[1]
        spent = perf_counter() - self._started - step.decode_seconds
        rest = spent - sum([source.seconds for source in asked])
        self._overhead += RATE * (rest - self._overhead)
        row = (curve.at(n_rows) / plain - 1.0) / max(1, n_rows - 1)
        accepted = set(step.path)
        for source in asked:
            source.learn(accepted, row, rest / len(asked), self._now, plain)
