"""Medusa: heads over the target's last hidden state guess the tokens after the next, all at once.

Cai et al. 2024, arXiv 2401.10774. Of each head the likeliest tokens are candidates; a fixed tree
says which choice of which head goes below which. Where somebody selects among the drafts (the
budget has a least path probability), the likeliest paths are drafted instead. In the first step of
a text nothing is drafted, see ``last_state``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.tree import Floats, TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.estimates import Estimates
from speculation.drafting.last_state import LastState
from speculation.heads.medusa import Heads
from speculation.heads.tree import (
    MAX_NODES,
    Choices,
    Path,
    best_tree,
    n_leaves,
    parse_choices,
    show_choices,
)
from speculation.ranges import check_ranges
from speculation.resources import Resources
from speculation.verify import Match, Typical, Verifier

LOSSY = "typical-lossy"
VERIFIERS = ("match", LOSSY)
# How often a head's first or second choice is the target's, by its probability in tenths, for the
# head that looks one token ahead and for those beyond it.
_FIRST = (0.06, 0.14, 0.24, 0.34, 0.43, 0.52, 0.60, 0.68, 0.77, 0.92)
_MAX_HEADS = 8
PRIORS = _FIRST * _MAX_HEADS
_N_BEST = 8  # choices of a head that are looked at where the tree is not fixed
_N_LEARNT = 2  # and those whose outcome teaches how far its probabilities are to be believed


@dataclass(frozen=True)
class MedusaParams:
    """Which candidates are drafted, and how they are checked.

    choices  the tree, as paths of ranks: 0.0.0.0/0.1.0/1.0/1.1 goes four deep along the first
             choices; candidates on the way to a path's end are part of it (the heads' own tree)
    nodes    draft tokens of a tree chosen by the accuracies that were measured in training; 0 takes
             the heads' own tree
    verify   match accepts the very tokens the sampler chooses; typical-lossy accepts any that are
             likely enough for the target, so that the text is another one
    epsilon  typical-lossy: a token is accepted from this probability on
    delta    typical-lossy: or from this share of exp(-entropy), where that is lower
    """

    choices: Choices = ""
    nodes: int = 0
    verify: str = "match"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if self.choices:
            object.__setattr__(self, "choices", show_choices(parse_choices(self.choices)))
        if self.verify == "typical":
            object.__setattr__(self, "verify", LOSSY)  # it is to say so wherever it is shown
        if self.choices and self.nodes:
            raise InvalidParameter("choices and nodes are both given; give one")
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
        """The nodes to draft. Raises InvalidParameter when they are deeper than there are heads."""
        if self.nodes:
            return best_tree(heads.accuracy, self.nodes)
        if not self.choices:
            return heads.tree
        nodes = parse_choices(self.choices)
        if len(nodes[-1]) > heads.n_heads:
            raise InvalidParameter(
                f"choices go {len(nodes[-1])} deep and there are {heads.n_heads} heads, one for "
                f"each depth; shorten the paths"
            )
        return nodes


class Medusa(Drafter):
    """The heads' guesses after the state of the last accepted token."""

    def __init__(
        self, params: MedusaParams, heads: Heads, estimates: Estimates | None = None
    ) -> None:
        """``estimates`` may be shared with the texts before.

        Raises InvalidParameter when the tree is deeper than there are heads.
        """
        self.params = params
        self._heads = heads
        self._nodes = params.tree(heads)
        self._n_ranks = 1 + max((path[-1] for path in self._nodes), default=0)
        self.requires = Requirements(hidden=True, branches=n_leaves(self._nodes))
        self._estimates = estimates or Estimates(PRIORS)
        self._state = LastState()
        self._guesses: list[list[tuple[int, int, float]]] = []  # by head: token, kind, probability

    def begin(self, prompt: Sequence[int]) -> None:
        self._estimates.new_text()
        self._state.forget()

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        hidden = self._state.before(tokens)
        self._guesses = []
        if hidden is None:
            return  # the first step of a text, or steps went by unseen
        self._guesses = self._guess(
            hidden, _N_BEST if budget.min_path_prob else max(self._n_ranks, _N_LEARNT)
        )
        if budget.min_path_prob:
            self._add_likeliest(tree, budget)
        else:
            self._add_chosen(tree, budget)

    def observe(self, step: Step) -> None:
        became = step.tokens
        for guesses, token in zip(self._guesses, became, strict=False):
            for guess, kind, _ in guesses[:_N_LEARNT]:
                self._estimates.learn(kind, accepted=guess == token)
        self._guesses = []
        self._state.see(step)

    def _guess(self, hidden: Floats, n: int) -> list[list[tuple[int, int, float]]]:
        """The ``n`` likeliest tokens of each head, with how likely they are to hold."""
        tokens, probs = self._heads.top(hidden, n)
        guesses = []
        for head, (some, values) in enumerate(zip(tokens.tolist(), probs.tolist(), strict=True)):
            first = 10 * min(head, _MAX_HEADS - 1)
            kinds = [first + min(9, int(10 * value)) for value in values]
            held = [self._estimates.of(kind) for kind in kinds]
            guesses.append(list(zip(some, kinds, held, strict=True)))
        return guesses

    def _add_chosen(self, tree: TokenTree, budget: DraftBudget) -> None:
        """The fixed tree, as far as there is room; parents come before their children."""
        placed: dict[Path, int] = {(): 0}
        for path in self._nodes:
            if budget.room(tree) <= 0:
                return
            guesses = self._guesses[len(path) - 1]
            if path[-1] < len(guesses) and path[:-1] in placed:
                token, _, prob = guesses[path[-1]]
                placed[path] = tree.add(placed[path[:-1]], token, prob=prob)

    def _add_likeliest(self, tree: TokenTree, budget: DraftBudget) -> None:
        """Best first, every path that is at least as likely as the budget asks."""
        open_paths: list[tuple[float, int, int, int, int, float]] = []
        age = 0

        def open_below(node: int, depth: int, reached: float) -> None:
            nonlocal age
            if depth < len(self._guesses):
                for token, _, prob in self._guesses[depth]:
                    if reached * prob >= budget.min_path_prob:
                        age += 1
                        heapq.heappush(open_paths, (-reached * prob, age, node, depth, token, prob))

        open_below(0, 0, 1.0)
        while open_paths and budget.room(tree) > 0:
            negative, _, parent, depth, token, prob = heapq.heappop(open_paths)
            open_below(tree.add(parent, token, prob=prob), depth + 1, -negative)


def _make(params: MedusaParams, resources: Resources) -> Medusa:
    heads = resources.require_heads("medusa", "medusa")
    estimates = resources.keep(("estimates", "medusa"), lambda: Estimates(PRIORS))
    return Medusa(params, heads, estimates)


def _verifier(params: MedusaParams, resources: Resources) -> Verifier:
    return Typical(params.epsilon, params.delta) if params.verify == LOSSY else Match()


def _source_params(resources: Resources) -> MedusaParams | None:
    return MedusaParams() if "medusa" in resources.heads else None


spec = MethodSpec(
    name="medusa",
    title="Medusa",
    params=MedusaParams,
    make=_make,
    verifier=_verifier,
    as_source=AsSource(_source_params),
)
