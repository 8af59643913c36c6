"""ReDrafter: a recurrent head searches for the likeliest beams after the target's last state.

Cheng et al. 2024, arXiv 2403.09919. Beams that begin alike are verified once: in a tree they are
one path. Where somebody selects among the drafts (the budget has a least path probability), beams
are no longer than they are worth, and what fell out of the search stays as a branch. In the first
step of a text nothing is drafted, as with Medusa: the state is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import AsSource, DraftBudget, MethodSpec, Requirements, Step
from speculation.drafting.confidence import PRIORS
from speculation.drafting.estimates import Estimates
from speculation.drafting.head_drafter import SearchingDrafter
from speculation.drafting.last_state import LastState
from speculation.drafting.tree_growth import (
    Candidate,
    best_nodes,
    grow,
    likeliest,
    named,
    top_beams,
)
from speculation.heads.redrafter import RecurrentHead
from speculation.ranges import check_ranges
from speculation.resources import Resources

MAX_NODES = 255


@dataclass(frozen=True)
class ReDrafterParams:
    """How far and how broadly the head searches.

    beams   paths kept from level to level, and tokens looked at below each
    length  tokens of a beam
    """

    beams: int = 4
    length: int = 4

    def __post_init__(self) -> None:
        check_ranges(self, (("beams", 1, 64), ("length", 1, 32)))
        if self.beams * self.length > MAX_NODES:
            raise InvalidParameter(
                f"{self.beams} beams of {self.length} tokens may be {self.beams * self.length} "
                f"nodes; give {MAX_NODES} at most"
            )


class ReDrafter(SearchingDrafter):
    """Beams after the state of the last accepted token."""

    def __init__(
        self,
        params: ReDrafterParams,
        head: RecurrentHead,
        *,
        estimates: Estimates | None = None,
        target_seconds: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(estimates, target_seconds)
        self.params = params
        self.requires = Requirements(hidden=True, branches=0 if params.beams == 1 else params.beams)
        self._head = head
        self._top = named(likeliest, head.tokens)
        self._state = LastState()

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._state.forget()

    def observe(self, step: Step) -> None:
        super().observe(step)
        self._state.see(step)

    def _search(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> tuple[list[Candidate], Sequence[int]] | None:
        hidden, params = self._state.before(tokens), self.params
        if hidden is None:
            return None  # the first step of a text, or another drafter's steps came in between
        nodes = grow(
            self._children(self._top, params.beams, budget),
            self._head.level,
            self._head.root(hidden, tokens[-1]),
            0,
            depth=min(params.length, budget.max_depth),
            width=params.beams,
        )
        if budget.min_path_prob:
            return nodes, best_nodes(nodes, budget.room(tree))
        return nodes, top_beams(nodes, params.beams)


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
