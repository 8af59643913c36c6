"""Token recycling: drafts from the target's own earlier predictions after each token.

A bigram table has, for every token, the likeliest successors from the last row with that token.
They are free, because the target computes them anyway. Each step grows a tree through the table
from the text's last token, best path first, and updates the table from its rows. Luo et al. 2024,
"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
arXiv 2408.08696. The paper's tree has a shape fixed by ranks; here it follows the successors'
calibrated probabilities, and only accepted rows update the table: each costs a partial sort of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp

from batching.logits import highest
from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import N_STRENGTHS, Acceptance, by_probability, of_probability
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import grow_best_first
from speculation.system.params import Params, param

# A successor was likely after another text, so it is accepted less often than its probability.
PRIORS = by_probability(-0.6, 0.85)
_N_NEXT = 8  # successors kept of a token

BigramTable = dict[int, list[tuple[int, float]]]  # token -> successors and their probabilities


@dataclass(frozen=True)
class RecyclingParams(Params):
    """The size of the tree."""

    nodes: int = param(39, "draft tokens in a tree", (1, 63))
    depth: int = param(6, "longest path", (1, 32))


class Recycling(Drafter):
    """Drafts a tree from the bigram table each step."""

    def __init__(
        self,
        params: RecyclingParams,
        table: BigramTable | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        """``table`` may be shared with earlier texts."""
        self.params = params
        self.requires = Requirements(logits=True, branches=min(params.nodes, 60))
        self._table: BigramTable = {} if table is None else table
        self._acceptance = acceptance or Acceptance(PRIORS)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        # A likelier successor must not count for less, or the best path is not found first.
        accepted = list(accumulate(map(self._acceptance.prob, range(N_STRENGTHS)), max))

        def successors(node: int) -> list[tuple[int, float]]:
            if tree.depths[node] >= self.params.depth:
                return []
            found = self._table.get(tree.tokens[node], ())
            return [(token, accepted[of_probability(prob)]) for token, prob in found]

        n_nodes = min(self.params.nodes, budget.room(tree))
        grow_best_first(tree, successors, n_nodes, budget.min_path_prob)

    def observe(self, step: Step) -> None:
        tree, table = step.tree, self._table
        for node, token in zip(step.path, step.tokens, strict=True):
            for successor, prob in table.get(tree.tokens[node], ())[:2]:
                self._acceptance.learn(of_probability(prob), accepted=successor == token)
        for node in step.path:
            table[tree.tokens[node]] = likeliest(step.output.logits(node))


def likeliest(logits: Floats) -> list[tuple[int, float]]:
    """The top tokens of a row's logits, (n_vocab,), likeliest first, with their probabilities.

    At most eight, and none more than 3,000 times less likely than the first. Probabilities are
    normalised over these alone, which saves a softmax over the vocabulary.
    """
    tokens, values = highest(logits, _N_NEXT)
    found = sorted(zip(values.tolist(), tokens.tolist(), strict=True), reverse=True)
    weights = [exp(value - found[0][0]) for value, _ in found]
    total = sum(weights)
    return [(token, weight / total) for (_, token), weight in zip(found, weights, strict=True)]


def _make(params: RecyclingParams, resources: Resources) -> Recycling:
    table: BigramTable = resources.keep("recycling table", dict)
    return Recycling(params, table, resources.acceptance("recycling", PRIORS))


spec = MethodSpec(
    name="recycling",
    title="Token recycling",
    params=RecyclingParams,
    make=_make,
)
