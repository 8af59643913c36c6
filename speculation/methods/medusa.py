"""Medusa: heads on the target's last hidden state predict several future tokens at once.

Cai et al. 2024, arXiv 2401.10774. Head i predicts the token i + 1 positions after the next. A fixed
tree combines the heads' likeliest tokens into paths. If the drafts are selected afterwards (the
budget has a minimum path probability), the likeliest paths are drafted instead. Drafts nothing in a
text's first step, see ``last_state``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter, check_ranges
from batching.together import Coroutine, Work
from batching.tree import TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import BY_PROBABILITY, N_STRENGTHS, Acceptance, of_probability
from speculation.drafting.last_state import LastState
from speculation.drafting.resources import Resources, if_loaded
from speculation.heads.arrays import Choices as HeadChoices
from speculation.heads.medusa import KIND, Heads
from speculation.heads.tree import (
    MAX_NODES,
    Choices,
    Path,
    best_tree,
    n_leaves,
    parse_choices,
)
from speculation.verify import Match, Typical, Verifier

LOSSY = "typical-lossy"
VERIFIERS = ("match", LOSSY)
_MAX_HEADS = 8
PRIORS = BY_PROBABILITY * _MAX_HEADS  # each head's choices are learnt by themselves
_N_CHOICES = 8  # choices per head if the tree is not fixed
_N_LEARNT = 2  # choices per head whose outcome is learnt from


@dataclass(frozen=True)
class MedusaParams:
    """The shape of the tree, and how it is verified.

    choices  the tree, as paths of ranks: 0.0.0.0/0.1.0/1.0/1.1 goes four deep along the first
             choices; all prefixes of a path are included (default: the heads' own tree)
    nodes    draft tokens of a tree built from the accuracies measured in training; 0 = the heads'
             own tree
    verify   match accepts exactly the tokens the sampler chooses; typical-lossy accepts any token
             that is likely enough for the target, which changes the text
    epsilon  typical-lossy: minimum probability of an accepted token
    delta    typical-lossy: or this share of exp(-entropy), if that is lower
    """

    choices: str = Choices()
    nodes: int = 0
    verify: str = "match"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if self.choices:
            parse_choices(self.choices)
        if self.choices and self.nodes:
            raise InvalidParameter("choices and nodes are both set; give only one")
        if self.verify not in VERIFIERS:
            raise InvalidParameter(f"verify is {self.verify!r}; give {' or '.join(VERIFIERS)}")
        check_ranges(
            self,
            (
                ("nodes", 0, MAX_NODES),
                ("epsilon", 0.0, 1.0),
                ("delta", 0.0, 1.0),
            ),
        )

    def tree(self, heads: Heads) -> tuple[Path, ...]:
        """The nodes to draft. Raises InvalidParameter if they are deeper than there are heads."""
        if self.nodes:
            return best_tree(heads.accuracy, self.nodes)
        if not self.choices:
            return heads.tree
        nodes = parse_choices(self.choices)
        if len(nodes[-1]) > heads.n_heads:
            raise InvalidParameter(
                f"choices go {len(nodes[-1])} deep, but there are only {heads.n_heads} heads, one "
                f"per level; shorten the paths"
            )
        return nodes


class Medusa(Drafter):
    """Drafts the heads' predictions from the state of the last accepted token."""

    def __init__(
        self, params: MedusaParams, heads: Heads, acceptance: Acceptance | None = None
    ) -> None:
        """Raises InvalidParameter if the tree is deeper than there are heads."""
        self.params = params
        self._heads = heads
        self._nodes = params.tree(heads)
        self._n_ranks = 1 + max((path[-1] for path in self._nodes), default=0)
        self.requires = Requirements(hidden=True, branches=n_leaves(self._nodes))
        self._acceptance = acceptance or Acceptance(PRIORS)
        self._state = LastState()
        # By head: (token, cell of acceptance, acceptance probability).
        self._predictions: list[list[tuple[int, int, float]]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._state.reset()

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        hidden = self._state.get(tokens)
        self._predictions = []
        if hidden is None:
            return  # the first step of a text, or it missed a step
        n = _N_CHOICES if budget.min_path_prob else max(self._n_ranks, _N_LEARNT)
        self._predictions = self._predictions_of((yield Work(self._heads.top, (hidden, n))))
        if budget.min_path_prob:
            self._add_likeliest(tree, budget)
        else:
            self._add_fixed_tree(tree, budget)

    def observe(self, step: Step) -> None:
        for choices, actual in zip(self._predictions, step.tokens, strict=False):
            for token, kind, _ in choices[:_N_LEARNT]:
                self._acceptance.learn(kind, accepted=token == actual)
        self._predictions = []
        self._state.observe(step)

    def _predictions_of(self, choices: Sequence[HeadChoices]) -> list[list[tuple[int, int, float]]]:
        """The likeliest tokens of each head, with their acceptance probabilities."""
        predictions = []
        for head, likeliest in enumerate(choices):
            first = N_STRENGTHS * min(head, _MAX_HEADS - 1)
            cells = [(token, first + of_probability(prob)) for token, prob in likeliest]
            predictions.append([(token, c, self._acceptance.prob(c)) for token, c in cells])
        return predictions

    def _add_fixed_tree(self, tree: TokenTree, budget: DraftBudget) -> None:
        """Add the fixed tree, parents first, while there is room."""
        placed: dict[Path, int] = {(): 0}
        for path in self._nodes:
            if budget.room(tree) <= 0:
                return
            choices = self._predictions[len(path) - 1]
            if path[-1] < len(choices) and path[:-1] in placed:
                token, _, prob = choices[path[-1]]
                placed[path] = tree.add(placed[path[:-1]], token, prob=prob)

    def _add_likeliest(self, tree: TokenTree, budget: DraftBudget) -> None:
        """Add all paths that reach the budget's minimum path probability, best first."""
        heap: list[tuple[float, int, int, int, int, float]] = []
        age = 0  # breaks ties

        def push_children(node: int, depth: int, path_prob: float) -> None:
            nonlocal age
            if depth < len(self._predictions):
                for token, _, prob in self._predictions[depth]:
                    if path_prob * prob >= budget.min_path_prob:
                        age += 1
                        heapq.heappush(heap, (-path_prob * prob, age, node, depth, token, prob))

        push_children(0, 0, 1.0)
        while heap and budget.room(tree) > 0:
            negative, _, parent, depth, token, prob = heapq.heappop(heap)
            push_children(tree.add(parent, token, prob=prob), depth + 1, -negative)


def _make(params: MedusaParams, resources: Resources) -> Medusa:
    heads = resources.require_heads(KIND.method, "medusa")
    acceptance = resources.acceptance("medusa", PRIORS)
    return Medusa(params, heads, acceptance)


def _verifier(params: MedusaParams, resources: Resources) -> Verifier:
    # At temperature 0 they are the same, but Match also shows the drafts to penalties.
    is_typical = params.verify == LOSSY and resources.sampling.temperature > 0
    return Typical(params.epsilon, params.delta) if is_typical else Match()


spec = MethodSpec(
    name="medusa",
    title="Medusa",
    params=MedusaParams,
    make=_make,
    verifier=_verifier,
    as_source=AsSource(if_loaded(KIND.method, MedusaParams())),
    heads=(KIND,),
)
