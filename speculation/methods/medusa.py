"""Medusa: heads on the target's last hidden state predict several future tokens at once.

Cai et al. 2024, arXiv 2401.10774. Head i predicts the token i + 1 positions after the next. The
heads' likeliest tokens combine into paths, of which the likeliest are drafted. (The paper's tree is
the same in every step.) Drafts nothing in a text's first step, see ``last_state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.together import Coroutine, Work
from batching.tree import TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import BY_PROBABILITY, N_STRENGTHS, Acceptance, of_probability
from speculation.drafting.last_state import LastState
from speculation.drafting.resources import Resources, if_loaded
from speculation.drafting.tree_growth import grow_best_first
from speculation.heads.medusa import KIND, MedusaHeads
from speculation.system.params import Params, param

_MAX_HEADS = 8
PRIORS = BY_PROBABILITY * _MAX_HEADS  # each head's choices are learnt by themselves
_N_LEARNT = 2  # choices per head whose outcome is learnt from


@dataclass(frozen=True)
class MedusaParams(Params):
    """The size of the tree."""

    nodes: int = param(15, "draft tokens: those with the likeliest paths", (1, 255))


class Medusa(Drafter):
    """Drafts the heads' predictions from the state of the last accepted token."""

    def __init__(
        self, params: MedusaParams, heads: MedusaHeads, acceptance: Acceptance | None = None
    ) -> None:
        self.params = params
        self.requires = Requirements(hidden=True, branches=min(params.nodes, 60))
        self._heads = heads
        self._acceptance = acceptance or Acceptance(PRIORS)
        self._state = LastState()
        self._predicted: list[list[tuple[int, int]]] = []  # by head: tokens and their cells

    def begin(self, prompt: Sequence[int]) -> None:
        self._state.reset()

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        hidden = self._state.get(tokens)
        self._predicted = []
        if hidden is None:
            return  # the first step of a text, or it missed a step
        choices = yield Work(self._heads.top, hidden)
        by_depth: list[list[tuple[int, float]]] = []
        for head, likeliest in enumerate(choices):
            first = N_STRENGTHS * min(head, _MAX_HEADS - 1)
            cells = [(token, first + of_probability(prob)) for token, prob in likeliest]
            self._predicted.append(cells)
            accepted = [(token, self._acceptance.prob(cell)) for token, cell in cells]
            by_depth.append(sorted(accepted, key=lambda pair: -pair[1]))
        by_depth.append([])  # below the last head's
        n_nodes = min(self.params.nodes, budget.room(tree))
        grow_best_first(
            tree, lambda node: by_depth[tree.depths[node]], n_nodes, budget.min_path_prob
        )

    def observe(self, step: Step) -> None:
        for cells, actual in zip(self._predicted, step.tokens, strict=False):
            for token, cell in cells[:_N_LEARNT]:
                self._acceptance.learn(cell, accepted=token == actual)
        self._predicted = []
        self._state.observe(step)


def _make(params: MedusaParams, resources: Resources) -> Medusa:
    heads = resources.require_heads(KIND.method, "medusa")
    return Medusa(params, heads, resources.acceptance("medusa", PRIORS))


spec = MethodSpec(
    name="medusa",
    title="Medusa",
    params=MedusaParams,
    make=_make,
    as_source=AsSource(if_loaded(KIND.method, MedusaParams(nodes=255))),
    heads=(KIND,),
)
