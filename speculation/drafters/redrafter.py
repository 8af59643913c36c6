"""ReDrafter: a recurrent head runs a beam search from the target's last hidden state.

Cheng et al. 2024, arXiv 2403.09919. The tree merges common prefixes of beams, so they are verified
once. If the drafts are selected afterwards (the budget has a minimum path probability), a beam ends
where it is no longer worth its cost, and candidates dropped by the search stay as branches. Drafts
nothing in a text's first step, see ``last_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.confidence import PRIORS, Confidence, LevelTime
from speculation.drafting.estimates import Estimates
from speculation.drafting.last_state import LastState
from speculation.drafting.tree_growth import (
    add_to_tree,
    best_nodes,
    grow,
    top_beams,
    top_children,
    top_tokens,
    with_target_ids,
)
from speculation.heads.redrafter import RecurrentHead
from speculation.ranges import check_ranges
from speculation.resources import Resources

MAX_NODES = 255


@dataclass(frozen=True)
class ReDrafterParams:
    """The size of the beam search.

    beams   paths kept per level, and candidates below each
    length  tokens in a beam
    """

    beams: int = 4
    length: int = 4

    def __post_init__(self) -> None:
        check_ranges(self, (("beams", 1, 64), ("length", 1, 32)))
        if self.beams * self.length > MAX_NODES:
            raise InvalidParameter(
                f"{self.beams} beams of {self.length} tokens may be {self.beams * self.length} "
                f"nodes; the limit is {MAX_NODES}"
            )


class ReDrafter(Drafter):
    """Drafts the beams found from the state of the last accepted token."""

    def __init__(
        self,
        params: ReDrafterParams,
        head: RecurrentHead,
        *,
        estimates: Estimates | None = None,
        target_seconds: Callable[[], float] | None = None,
    ) -> None:
        """``estimates`` may be shared with earlier texts.

        ``target_seconds`` returns the cost of a target step. With it, and if the budget has a
        minimum path probability, drafting stops when it is no longer worth its time.
        """
        self.params = params
        self.requires = Requirements(hidden=True, branches=0 if params.beams == 1 else params.beams)
        self._head = head
        self._top = with_target_ids(top_tokens, head.tokens)
        self._confidence = Confidence(estimates)
        self._time = LevelTime(target_seconds)
        self._state = LastState()

    def begin(self, prompt: Sequence[int]) -> None:
        self._confidence.estimates.new_text()
        self._state.reset()

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        hidden = self._state.get(tokens)
        self._confidence.set_candidates(())
        if hidden is None:
            return  # the first step of a text, or plain steps in between
        params, start = self.params, perf_counter()
        nodes = grow(
            top_children(
                self._top,
                params.beams,
                self._time.min_path_prob(budget),
                self._confidence.acceptance_prob,
            ),
            self._head.level,
            self._head.root(hidden, tokens[-1]),
            0,
            depth=min(params.length, budget.max_depth),
            width=params.beams,
        )
        if budget.min_path_prob:
            chosen = best_nodes(nodes, budget.room(tree))
        else:
            chosen = top_beams(nodes, params.beams)
        add_to_tree(nodes, chosen, tree, budget, self._confidence.acceptance_prob)
        self._confidence.set_candidates(nodes)
        self._time.record(perf_counter() - start, nodes)

    def observe(self, step: Step) -> None:
        self._confidence.learn(step)
        self._state.observe(step)


def _make(params: ReDrafterParams, resources: Resources) -> ReDrafter:
    return ReDrafter(
        params,
        resources.require_heads("redrafter", "redrafter"),
        estimates=resources.keep(("estimates", "redrafter"), lambda: Estimates(PRIORS)),
        target_seconds=resources.step_seconds,
    )


def _source_params(resources: Resources) -> ReDrafterParams | None:
    return ReDrafterParams() if "redrafter" in resources.heads else None


spec = MethodSpec(
    name="redrafter",
    title="ReDrafter",
    params=ReDrafterParams,
    make=_make,
    as_source=AsSource(_source_params),
)
