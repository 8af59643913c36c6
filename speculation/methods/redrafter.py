"""ReDrafter: a recurrent head runs a beam search from the target's last hidden state.

Cheng et al. 2024, arXiv 2403.09919. The tree merges common prefixes of beams, so they are verified
once. If the drafts are selected afterwards (the budget has a minimum path probability), a beam ends
where it is no longer worth its cost, and candidates dropped by the search stay as branches. Drafts
nothing in a text's first step, see ``last_state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.together import Coroutine, Work
from batching.tree import Floats
from speculation.drafter import AsSource, DraftBudget, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.last_state import LastState
from speculation.drafting.resources import Resources, if_loaded
from speculation.drafting.tree_growth import (
    Growth,
    LevelTime,
    TreeDrafter,
    top_tokens,
    with_target_ids,
)
from speculation.heads.redrafter import KIND, Beams, Level, ReDrafterHead
from speculation.system.params import Params, param

MAX_NODES = 255


@dataclass(frozen=True)
class ReDrafterParams(Params):
    """The size of the beam search."""

    beams: int = param(4, "paths kept per level, and candidates below each", (1, 64))
    length: int = param(4, "tokens in a beam", (1, 32))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams * self.length > MAX_NODES:
            raise InvalidParameter(
                f"{self.beams} beams of {self.length} tokens may be {self.beams * self.length} "
                f"nodes; the limit is {MAX_NODES}"
            )


class ReDrafter(TreeDrafter):
    """Drafts the beams found from the state of the last accepted token."""

    def __init__(
        self,
        params: ReDrafterParams,
        head: ReDrafterHead,
        *,
        acceptance: Acceptance | None = None,
        level_time: LevelTime | None = None,
    ) -> None:
        super().__init__(acceptance, level_time)
        self.params = params
        self.requires = Requirements(hidden=True, branches=0 if params.beams == 1 else params.beams)
        self._head = head
        self._top = with_target_ids(top_tokens, head.tokens)
        self._state = LastState()
        self._above: Level

    def begin(self, prompt: Sequence[int]) -> None:
        self._state.reset()

    def observe(self, step: Step) -> None:
        super().observe(step)
        self._state.observe(step)

    def _grow(
        self, growth: Growth, tokens: Sequence[int], budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        hidden, params = self._state.get(tokens), self.params
        if hidden is None:
            return ()  # the first step of a text, or it missed a step
        yield from growth.levels(
            lambda node, logits: growth.add_likely(node, self._top(logits, params.beams)),
            self._level,
            (yield from self._root(hidden, tokens[-1])),
            0,
            depth=min(params.length, budget.max_depth),
            width=params.beams,
        )
        is_selected = budget.min_path_prob > 0.0
        return growth.likeliest(budget.max_nodes) if is_selected else growth.beams(params.beams)

    def _root(self, hidden: Floats, token: int) -> Coroutine[Level]:
        """Decode the text's last token, which was chosen from ``hidden``."""
        self._above = yield Work(self._head.advance, Beams(hidden, [token], None))
        return self._above

    def _level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Level]:
        self._above = yield Work(self._head.advance, self._above.below(parents, tokens))
        return self._above


def _make(params: ReDrafterParams, resources: Resources) -> ReDrafter:
    return ReDrafter(
        params,
        resources.require_heads(KIND.method, "redrafter"),
        acceptance=resources.acceptance("redrafter"),
        level_time=LevelTime.of("redrafter", resources),
    )


spec = MethodSpec(
    name="redrafter",
    title="ReDrafter",
    params=ReDrafterParams,
    make=_make,
    as_source=AsSource(if_loaded(KIND.method, ReDrafterParams())),
    heads=(KIND,),
)
