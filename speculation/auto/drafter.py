"""The method ``auto``: combines all available drafters and selects drafts by measured cost.

The drafters ("sources") grow one wide tree, each node with its probability of acceptance.
``choose`` picks the nodes with the most expected tokens per second, given the measured cost of a
batch, and only these are decoded. A source is asked only if what it is expected to add is worth its
time (``source``); if none is, the text is decoded in plain steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from batching import clock
from batching.errors import InvalidParameter
from batching.together import Coroutine
from batching.tree import TokenTree
from speculation.auto.fusion import fuse
from speculation.auto.source import EXPLORATION, Asks, Source
from speculation.drafter import (
    Chooser,
    DraftBudget,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.drafting.cost import SIZES, Cost, Prices
from speculation.drafting.resources import Resources
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.system.params import Params, param

# Nodes below this path probability are never drafted. Where rows are nearly free, this bounds the
# time that Python takes for them.
_MIN_PATH_PROB = 0.05


@dataclass(frozen=True)
class AutoParams(Params):
    """Limits for auto."""

    rows_max: int = param(SIZES[-1], "most rows in a batch", (1, SIZES[-1]))
    sources: str = param(
        "all", "allowed sources: all that are available, or names joined by +, such as suffix+draft"
    )
    memory: bool = param(True, "also draft from earlier texts, and remember this one")

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
    """A drafter for one text. What it learns is shared by all of them.

    None, for plain decoding, if the model cannot roll back drafts.
    """
    if not resources.n_rewind:
        return None
    cost = resources.cost  # measured before there are views of the resources
    theirs = resources if params.memory else replace(resources, memory=SuffixMemory.off())
    sources = []
    for spec in methods():
        name, as_source = spec.source_name, spec.as_source
        if as_source is None or not params.allows(name):
            continue
        source_params = as_source.params(resources)
        if source_params is None:
            if name in params.named:  # raises an error if a resource is missing
                spec.make(spec.params(), resources)
            continue
        drafter = spec.make(source_params, theirs)
        if drafter is not None:
            sources.append(Source(name, drafter, _asks(name, resources, drafter.share)))
    return Auto(params, sources, cost)


def _asks(name: str, resources: Resources, share: float) -> Asks:
    """What is known of asking a source: at first what two levels and a row are expected to take."""

    def make(saved: object) -> Asks:
        cost, curve = resources.cost, resources.cost.curve(0)
        seconds = 2 * share * curve.at(1) + curve.at(2) - curve.at(1)
        return Asks(saved, seconds=seconds, reading=share * cost.row_seconds)

    return resources.learnt(name, make)


def known_asks(resources: Resources) -> dict[str, Asks]:
    """What is known of asking the sources of the texts so far."""
    return {name: one for name, one in resources.kept.objects.items() if isinstance(one, Asks)}


class Auto(Chooser):
    """Lets the sources worth their time grow the tree, of which the loop decodes the best nodes."""

    def __init__(self, params: AutoParams, sources: Sequence[Source], cost: Cost) -> None:
        self.params, self.sources, self.cost = params, sources, cost
        share = max(cost.curve(0).row_share, _MIN_PATH_PROB)
        # Leaves are mutually exclusive, so at most 1 / share of them can be worth a row.
        self._max_leaves = max(2, math.ceil(1 / share))
        self._asked: list[Source] = []
        self._promised: int | None = None  # the first source worth asking in the coming step
        self._prices = cost.prices(0)  # of the present step
        # Seconds that tries may take in this text: what its drafts saved, and a share of its time.
        self._spare = 0.0

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """The needs of all sources; only those with a gain read the next prompt's states."""
        every = Requirements.of_all(source.drafter.requires for source in self.sources)
        plain = self.cost.prices(0).plain
        readers = [
            source.drafter.requires for source in self.sources if source.asks.gain(plain) > 0.0
        ]
        prompt_reader = Requirements.of_all(readers).prompt_reader
        return replace(every, prompt_reader=prompt_reader, rows=1, branches=self._max_leaves)

    def begin(self, prompt: Sequence[int]) -> None:
        self.cost.begin()
        self._spare, self._promised = 0.0, None
        for source in self.sources:
            source.begin(prompt)

    def n_unread(self, tokens: Sequence[int]) -> int:
        return max([source.drafter.n_unread(tokens) for source in self.sources], default=0)

    def end(self, tokens: Sequence[int]) -> None:
        for source in self.sources:
            source.end(tokens)

    def promise(self, tokens: Sequence[int], prices: Prices | None = None) -> float:
        """1 if a source is worth asking, else 0. A rough cost is checked by plain steps first."""
        self._prices = prices = prices or self.cost.prices(len(tokens) - 1)
        if not self.cost.is_checked and prices.n_texts == 1:
            return 0.0
        for i, source in enumerate(self.sources):
            if source.is_worth_asking(tokens, prices, self._spare):
                self._promised = i
                return 1.0
        return 0.0

    def observe_plain(self, steps: PlainSteps) -> None:
        self._earn(sum(steps.seconds))
        for source in self.sources:
            source.skip(steps)

    def _earn(self, seconds: float) -> None:
        """The time of steps, which the text may share with others, pays for tries."""
        earned = EXPLORATION * seconds / self._prices.n_texts
        self._spare += earned
        for source in self.sources:
            source.asks.credit += earned

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        self._prices = prices = budget.prices or self.cost.prices(len(tokens) - 1)
        self.budget = shared = budget._replace(
            max_nodes=min(budget.max_nodes, self.params.rows_max - 1),
            max_leaves=min(budget.max_leaves, self._max_leaves),
            min_path_prob=max(prices.curve.row_share, _MIN_PATH_PROB),
            prices=prices,
        )
        self._asked = asked = []
        left, drafted = 1.0, 0.0
        first, self._promised = self._promised, None
        for i, source in enumerate(self.sources[first or 0 :], first or 0):
            if len(tree) > 1:
                path_probs = tree.path_probs()
                drafted = sum(path_probs) - 1.0
                firsts = [node for node, depth in enumerate(tree.depths) if depth == 1]
                left = 1.0 - sum([path_probs[node] for node in firsts])
            is_promised = i == first and not drafted  # then it was looked at already
            if not is_promised and not source.is_worth_asking(
                tokens, prices, self._spare, left, drafted
            ):
                continue
            own = tree if len(tree) == 1 else TokenTree(tree.tokens[0])
            yield from source.draft(tokens, own, shared)
            source.nodes = range(1, len(own)) if own is tree else fuse(tree, own)
            asked.append(source)

    def keep(self, tree: TokenTree, nodes: list[int]) -> None:
        """Drop the other drafts, and record whose drafts the ``nodes`` are."""
        tree.keep(nodes)
        tree.sources.clear()
        new = dict(zip(nodes, range(1, len(nodes) + 1), strict=True))
        for source in reversed(self._asked):  # a draft of several counts as the first one's
            source.nodes = [new[node] for node in source.nodes if node in new]
            tree.sources.update(dict.fromkeys(source.nodes, source.name))

    def observe(self, step: Step) -> None:
        start = clock.now()
        self._earn(step.decode_seconds)
        for source in self.sources:
            source.observe(step)
        asked = self._asked
        if not asked:
            return
        curve, n, n_rows = self._prices.curve, self._prices.n_texts, self.cost.last_rows
        spent = step.own_seconds + clock.now() - start
        rest = spent - sum([source.seconds for source in asked])
        self.cost.overhead.add(rest)
        row = (curve.at(n_rows) - curve.at(n)) / max(1, n_rows - n)
        accepted = set(step.path)
        saved = (len(accepted) - 1) * self._prices.plain
        self._spare += saved - row * (len(step.tree) - 1) - spent
        for source in asked:
            source.learn(accepted, row, rest / len(asked))
