"""Resources: what an engine offers its methods beyond the text, kept while the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from batching.draft_context import LevelDecoder
from batching.errors import InvalidParameter
from batching.target import Target
from batching.tree import NO_LIMIT
from speculation.auto.cost_curve import CostModel
from speculation.drafters.draft_model import DraftSampler
from speculation.drafters.recycling import SuccessorTable
from speculation.drafting.block_context import BlockLevels
from speculation.drafting.head_context import AttachedLevels, HeadLevels
from speculation.drafting.head_drafter import Levels
from speculation.heads.medusa import Heads
from speculation.heads.redrafter import RecurrentHead
from speculation.sampling import SamplingParams

T = TypeVar("T")

OR_IN_CHAT = ", or in the chat under Model"


class Resources:
    """What a decode costs, the draft model, and what methods have learnt.

    Drafters live for one text. What is to outlive it (probabilities counted, tables filled) is
    kept here, in memory only.

    n_rewind  drafts that the target can take back, as in ``Target``
    draft     the draft model's context, or None
    heads     drafting heads, by the method they are for
    sampling  how the tokens of the text at hand are chosen
    """

    def __init__(
        self,
        measure_cost: Callable[[], CostModel] | None = None,
        *,
        n_rewind: int = NO_LIMIT,
        draft: Target | None = None,
        heads: Mapping[str, Any] | None = None,
        successors: Callable[[], SuccessorTable] = SuccessorTable,
        draft_sampler: Callable[[], DraftSampler] | None = None,
    ) -> None:
        """``measure_cost`` and ``successors`` are called once, when a method first asks for them;
        ``draft_sampler`` for each text whose drafts are to be sampled."""
        self._measure_cost = measure_cost
        self._cost: CostModel | None = None
        self._successors = successors
        self._kept: dict[Any, Any] = {}
        self.n_rewind = n_rewind
        self.draft = draft
        self.heads = dict(heads or {})
        self.draft_sampler = draft_sampler
        self.sampling = SamplingParams()

    @property
    def cost(self) -> CostModel:
        """What a batch of n rows costs here. The first use measures it, in a second or two."""
        if self._cost is None:
            if self._measure_cost is None:
                raise RuntimeError("these resources were made without a way to measure cost")
            self._cost = self._measure_cost()
        return self._cost

    @property
    def known_cost(self) -> CostModel | None:
        """The cost if it was asked for before."""
        return self._cost

    @property
    def successors(self) -> SuccessorTable:
        """The table of likely successors: what came with the model, and every text since."""
        return self.keep("successors", self._successors)

    @property
    def levels(self) -> LevelDecoder:
        """The draft model's context, as the drafters use it.

        Raises InvalidParameter when no draft model was loaded.
        """
        draft = self.draft
        if draft is None:
            raise InvalidParameter(
                "method draft needs a draft model and none was loaded; give one with "
                f"--draft-model{OR_IN_CHAT}"
            )
        return self.keep("levels", lambda: LevelDecoder(draft))

    @property
    def medusa(self) -> Heads:
        """The Medusa heads. Raises InvalidParameter when none were loaded."""
        heads: Heads | None = self.heads.get("medusa")
        if heads is None:
            raise InvalidParameter(
                "method medusa needs heads for it and none were loaded; give them with "
                f"--heads{OR_IN_CHAT}"
            )
        return heads

    @property
    def redrafter(self) -> RecurrentHead:
        """ReDrafter's head. Raises InvalidParameter when none was loaded."""
        head: RecurrentHead | None = self.heads.get("redrafter")
        if head is None:
            raise InvalidParameter(
                "method redrafter needs a head for it and none was loaded; give it with "
                f"--heads{OR_IN_CHAT}"
            )
        return head

    def head_levels(self, name: str) -> Levels:
        """The text in the context of the head ``name``: eagle, eagle-3, mtp or dflash.

        Raises InvalidParameter when none was loaded.
        """
        heads = self.heads.get(name)
        if heads is None and name == "mtp":
            raise InvalidParameter(
                "method mtp needs a model with layers of its own for multi-token prediction, and "
                "none were loaded that llama.cpp can run; give a file that holds them with "
                f"--heads{OR_IN_CHAT}, or use auto"
            )
        if heads is None:
            raise InvalidParameter(
                f"this method needs a head of the kind {name} and none was loaded; give one with "
                f"--heads{OR_IN_CHAT}"
            )
        return self.keep(("levels", name), lambda: _levels_of(heads))

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What is kept under ``key``, made when it is asked for first."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found


def _levels_of(head: Any) -> Levels:
    if head.drafts_blocks:
        return BlockLevels(head)
    return AttachedLevels(head) if head.attends_to_target else HeadLevels(head)
