"""Token recycling: drafts from the target's own earlier predictions after each token.

A bigram table has, for every token, the k likeliest successors from the last row with that token.
They are free, because the target computes them anyway. Each step grows a tree through the table
from the text's last token, best path first, and updates the table from its rows. Luo et al. 2024,
"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
arXiv 2408.08696. The paper's tree has a shape fixed by ranks; here it follows the successors'
calibrated probabilities, and only accepted rows update the table: each costs a partial sort of the
vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from batching.errors import check_ranges
from batching.tree import TokenTree
from speculation.bigrams import BigramTable, load_bigrams
from speculation.drafter import DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import N_STRENGTHS, Acceptance, by_probability, of_probability
from speculation.drafting.resources import Resources

# A successor was likely after another text, so it is accepted less often than its probability.
PRIORS = by_probability(-0.6, 0.85)


@dataclass(frozen=True)
class RecyclingParams:
    """The size of the tree, and how the table is updated.

    nodes   draft tokens in a tree
    depth   longest path
    warm    start with the table supplied with the model, if any
    """

    nodes: int = 39
    depth: int = 6
    warm: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, (("nodes", 1, 63), ("depth", 1, 32)))


class Recycling(Drafter):
    """Drafts a tree from the bigram table each step."""

    def __init__(
        self, params: RecyclingParams, table: BigramTable, acceptance: Acceptance | None = None
    ) -> None:
        """``table`` may be shared with earlier texts."""
        self.params = params
        self.requires = Requirements(logits=True, branches=min(params.nodes, 60))
        self._table = table
        self._acceptance = acceptance or Acceptance(PRIORS)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        """Grow the tree best-first: repeatedly add the successor with the likeliest path.

        Only the likeliest unused successor of each node is in the heap.
        """
        floor, depth = budget.min_path_prob, self.params.depth
        n_left = min(self.params.nodes, budget.room(tree))
        successors, push, pop = self._table.of, heapq.heappush, heapq.heappop
        accepted = list(accumulate(map(self._acceptance.prob, range(N_STRENGTHS)), max))
        # (-path prob, age to break ties, parent, its successors, index, the parent's path prob)
        heap: list[tuple[float, int, int, list[tuple[int, float]], int, float]] = []
        age = 0
        node, node_prob, children = 0, 1.0, successors(tree.tokens[0])
        while True:
            if children and tree.depths[node] < depth:
                path_prob = node_prob * accepted[of_probability(children[0][1])]
                if path_prob >= floor:
                    push(heap, (-path_prob, age, node, children, 0, node_prob))
                    age += 1
            if n_left <= 0 or not heap:
                return
            negative, _, parent, siblings, i, parent_prob = pop(heap)
            token, node_prob = siblings[i][0], -negative
            node = tree.add(parent, token, prob=node_prob / parent_prob)
            n_left -= 1
            children = successors(token)
            if i + 1 < len(siblings):
                path_prob = parent_prob * accepted[of_probability(siblings[i + 1][1])]
                if path_prob >= floor:
                    push(heap, (-path_prob, age, parent, siblings, i + 1, parent_prob))
                    age += 1

    def observe(self, step: Step) -> None:
        tree, table = step.tree, self._table
        for node, token in zip(step.path, step.tokens, strict=True):
            for successor, p in table.of(tree.tokens[node])[:2]:
                self._acceptance.learn(of_probability(p), accepted=successor == token)
        for node in step.path:
            table.learn(tree.tokens[node], step.output.logits(node))


def _make(params: RecyclingParams, resources: Resources) -> Recycling:
    model = resources.model
    if params.warm and model is not None:
        table = resources.keep("bigrams", lambda: load_bigrams(model))
    else:
        table = resources.keep("cold bigrams", BigramTable)
    return Recycling(params, table, resources.acceptance("recycling", PRIORS))


spec = MethodSpec(
    name="recycling",
    title="Token recycling",
    params=RecyclingParams,
    make=_make,
)
