"""Token recycling: what the model thought likely after a token, last time it was there.

A table holds for every token the k most likely successors of the row where it was decoded last.
They cost nothing: the target computed them anyway. From the last token of the text a tree is grown
through the table, best path first, and the table is refreshed from the rows of every step. After
Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling", arXiv 2408.08696. There the tree's shape is fixed by rank; here the successors'
own probabilities shape it, corrected by how often such drafts have held.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.bigrams import BigramTable, load_bigrams
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.estimates import Estimates
from speculation.ranges import check_ranges
from speculation.resources import Resources

ROWS = ("path", "all")
# How often a successor is accepted, by its probability when it was stored, in tenths; set by
# judgement, and soon overruled by what is counted.
PRIORS = (0.04, 0.12, 0.20, 0.27, 0.34, 0.41, 0.48, 0.55, 0.63, 0.75)


@dataclass(frozen=True)
class RecyclingParams:
    """How the tree is grown and the table refreshed.

    nodes   draft tokens of a tree
    depth   longest path
    rows    whose successors are kept: those of accepted tokens (path), or of rejected ones too
            (all), as in the paper; each costs a partial sort of the vocabulary
    warm    start with the table that comes with the model, if there is one
    """

    nodes: int = 39
    depth: int = 6
    rows: str = "path"
    warm: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, (("nodes", 1, 63), ("depth", 1, 32)))
        if self.rows not in ROWS:
            raise InvalidParameter(f"rows is {self.rows!r}; give one of {', '.join(ROWS)}")


class Recycling(Drafter):
    """A tree through the bigram table each step."""

    def __init__(
        self, params: RecyclingParams, table: BigramTable, estimates: Estimates | None = None
    ) -> None:
        """``table`` and ``estimates`` may be shared with the texts before."""
        self.params = params
        self.requires = Requirements(branches=min(params.nodes, 60))
        self._table = table
        self._estimates = estimates or Estimates(PRIORS)

    def begin(self, prompt: Sequence[int]) -> None:
        self._estimates.new_text()

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        """Best-first: of all successors of nodes in the tree the one with the likeliest path.

        A node's successors wait behind its likeliest one: one comes into question when the one
        before it is taken.
        """
        floor, depth = budget.min_path_prob, self.params.depth
        most = min(self.params.nodes, budget.room(tree))
        successors, push, pop = self._table.of, heapq.heappush, heapq.heappop
        by_tenth = list(accumulate(map(self._estimates.of, range(10)), max))
        # -path prob, age, parent, its successors, which of them, the parent's path prob
        waiting: list[tuple[float, int, int, list[tuple[int, float]], int, float]] = []
        age = 0
        node, reached, known = 0, 1.0, successors(tree.tokens[0])
        while True:
            if known and tree.depths[node] < depth:
                path_prob = reached * by_tenth[min(9, int(10 * known[0][1]))]
                if path_prob >= floor:
                    push(waiting, (-path_prob, age, node, known, 0, reached))
                    age += 1
            if most <= 0 or not waiting:
                return
            negative, _, parent, siblings, i, above = pop(waiting)
            token, reached = siblings[i][0], -negative
            node = tree.add(parent, token, prob=reached / above)
            most -= 1
            known = successors(token)
            if i + 1 < len(siblings):
                path_prob = above * by_tenth[min(9, int(10 * siblings[i + 1][1]))]
                if path_prob >= floor:
                    push(waiting, (-path_prob, age, parent, siblings, i + 1, above))
                    age += 1

    def observe(self, step: Step) -> None:
        tree, table = step.tree, self._table
        became = step.tokens
        for node, token in zip(step.path, became, strict=True):
            for successor, p in table.of(tree.tokens[node])[:2]:
                self._estimates.learn(min(9, int(10 * p)), accepted=successor == token)
        if self.params.rows == "all":
            for node, output in enumerate(tree.outputs):
                if output:
                    table.learn(tree.tokens[node], step.output.logits(node))
        else:
            for node in step.path:
                table.learn(tree.tokens[node], step.output.logits(node))


def _make(params: RecyclingParams, resources: Resources) -> Recycling:
    model = resources.model
    if params.warm and model is not None:
        table = resources.keep("bigrams", lambda: load_bigrams(model))
    else:
        table = resources.keep("cold bigrams", BigramTable)
    return Recycling(
        params, table, resources.keep(("estimates", "recycling"), lambda: Estimates(PRIORS))
    )


spec = MethodSpec(
    name="recycling",
    title="Token recycling",
    params=RecyclingParams,
    make=_make,
    as_source=AsSource(lambda resources: RecyclingParams(nodes=48)),
)
