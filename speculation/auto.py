"""auto: every source at hand proposes, measured cost decides.

The sources, each a drafter of its own, grow one wide tree and say how likely each node is to hold.
``policy.choose`` picks from it the nodes with the most expected tokens per second, given what a
batch of so many rows costs here. A source that has cost more than it gave rests for a while, so
that a text nobody can predict is decoded at plain speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.cost import SIZES, CostModel
from speculation.drafter import Drafter, Step
from speculation.policy import choose

_FLOOR = 0.02  # path probability below which nothing is looked at, however cheap a row
_FIRST_REST, _LONGEST_REST = 8, 64  # steps
_BALANCE_RATE = 1 / 16


@dataclass(frozen=True)
class AutoParams:
    """What auto may do.

    rows_max   most rows of a batch
    """

    rows_max: int = SIZES[-1]

    def __post_init__(self) -> None:
        if not 1 <= self.rows_max <= SIZES[-1]:
            raise InvalidParameter(f"rows_max is {self.rows_max}; give 1 to {SIZES[-1]}")


class Source:
    """A drafter among others: its name, and whether it has been worth its time.

    balance  seconds it saved less seconds it took, a step, on average of late
    """

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.name = name
        self.drafter = drafter
        self.awake = True
        self.balance = 0.0
        self.seconds = 0.0  # spent in this step
        self._rest = _FIRST_REST
        self._left = 0
        self._fresh = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self.drafter.begin(prompt)
        self.awake, self.balance, self._rest, self._fresh = True, 0.0, _FIRST_REST, 0

    def settle(self, gain: float) -> None:
        """Book what a step gained by this source, in seconds; send it to rest when in debt."""
        self.balance += _BALANCE_RATE * (gain - self.seconds - self.balance)
        self._fresh += 1
        if self._fresh >= 8 and self.balance < 0:
            self.awake, self._left = False, self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        elif self.balance > 0 and gain > 0:
            self._rest = _FIRST_REST

    def rest(self) -> None:
        """Another step without it."""
        self._left -= 1
        if self._left <= 0:
            self.awake, self.balance, self._fresh = True, 0.0, 4


class Auto:
    """One wide tree of all sources' candidates a step, and the choice among them."""

    def __init__(self, params: AutoParams, sources: Sequence[Source], cost: CostModel) -> None:
        self.params = params
        self.sources = list(sources)
        self.cost = cost
        share = max(cost.curve(0).row_share(), _FLOOR)
        # Leaves exclude each other, so no more of them than 1 / floor can be worth a row.
        self.n_branches = max(2, min(48, math.ceil(1 / share)))
        self._offered: dict[int, Source] = {}
        self._n_past = 0

    def begin(self, prompt: Sequence[int]) -> None:
        for source in self.sources:
            source.begin(prompt)

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        self._n_past = len(tokens) - 1
        self._offered = {}
        curve = self.cost.curve(self._n_past)
        wide = TokenTree(tokens[-1], tree.max_nodes)
        wide.floor = max(curve.row_share(), _FLOOR)
        owners: list[tuple[int, Source]] = []
        for source in self.sources:
            if not source.awake:
                continue
            start = perf_counter()
            source.drafter.draft(tokens, wide)
            source.seconds = perf_counter() - start
            owners.append((len(wide), source))
        if len(wide) == 1:
            return
        last_rows, switch_seconds = self.cost.switch_seconds(self._n_past)
        chosen = choose(
            wide,
            curve.table(),
            last_rows=last_rows,
            switch_seconds=switch_seconds,
            max_nodes=min(tree.room, self.params.rows_max - 1),
        )
        self._take(wide, chosen, owners, tree)

    def _take(
        self,
        wide: TokenTree,
        chosen: Sequence[int],
        owners: Sequence[tuple[int, Source]],
        tree: TokenTree,
    ) -> None:
        """Copy the chosen nodes into the tree, and remember whose they are."""
        new: dict[int, int] = {0: 0}
        for node in chosen:
            parent = new[wide.parents[node]]
            taken = new[node] = tree.add(parent, wide.tokens[node], prob=wide.probs[node])
            source = next(source for end, source in owners if node < end)
            self._offered[taken] = source
            tree.sources[taken] = source.name

    def observe(self, step: Step) -> None:
        n_rows = len(step.tree)
        self.cost.follow(n_rows, self._n_past, step.decode_seconds)
        table = self.cost.curve(self._n_past).table()
        plain = table[1]
        row = (table[min(n_rows, len(table) - 1)] - plain) / (n_rows - 1) if n_rows > 1 else 0.0
        offered = self._offered
        for source in self.sources:
            if not source.awake:
                source.rest()
                continue
            start = perf_counter()
            source.drafter.observe(step)
            gain = 0.0
            if offered:
                mine = sum([owner is source for owner in offered.values()])
                held = sum([offered[node] is source for node in step.path[1:]])
                gain = held * plain - mine * row
            source.seconds += perf_counter() - start
            source.settle(gain)
