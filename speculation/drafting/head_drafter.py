"""HeadDrafter: drafts with any head that takes the target's states as input.

The tree follows the head's confidence, as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the
likeliest paths of each level are expanded, and the best of all nodes are kept. The levels come from
successive decodes of the head or from the positions of one block (``head_context``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from batching.together import Coroutine, own_time
from batching.tree import NO_LIMIT
from speculation.drafter import DraftBudget, Requirements, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.head_context import AttachedHeadContext, BlockContext, HeadContext
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import Growth, LevelTime, Scores, TreeDrafter
from speculation.heads.base import HeadInContext
from speculation.heads.dflash import DFlashHead
from speculation.system.params import Params, param

MAX_WIDTH = 16  # expanded nodes per level: sequences of the head's context
MAX_DEPTH = 16

TreeDraftContext = HeadContext | AttachedHeadContext | BlockContext


class HeadParams(Protocol):
    """The parameters of every head method: prompt tokens to read, and the size of the trees."""

    @property
    def window(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def n_branches(self) -> int: ...


WINDOW = (
    "tokens at the end of a prompt that the head reads; with 0 it drafts from the second step on"
)


@dataclass(frozen=True)
class GrownParams(Params):
    """The size of a confidence-driven tree."""

    depth: int = param(5, "levels: draft tokens in a row", (1, MAX_DEPTH))
    top_k: int = param(8, "nodes expanded per level, and candidates below each", (1, MAX_WIDTH))
    nodes: int = param(
        24, "draft tokens in the tree: the candidates with the likeliest paths", (1, 255)
    )
    p_min: float = param(0.0, "minimum probability the head must give a draft", (0.0, 1.0))
    window: int = param(64, WINDOW, (0, NO_LIMIT))

    @property
    def width(self) -> int:
        return self.top_k

    @property
    def n_branches(self) -> int:
        return 0 if self.top_k == 1 else self.nodes


class HeadDrafter(TreeDrafter):
    """Keeps the head's context in step with the text and drafts a tree each step."""

    def __init__(
        self,
        params: HeadParams,
        context: TreeDraftContext,
        *,
        acceptance: Acceptance | None = None,
        level_time: LevelTime | None = None,
    ) -> None:
        """``context`` is shared by all texts; see the base class for the rest."""
        super().__init__(acceptance, level_time)
        self.params = params
        self._context = context
        self._last = 0  # position of the text's last token
        self.requires = Requirements(
            hidden=context.head.needs_hidden,
            layers=context.head.layers,
            prompt_reader=_PromptReader(context, self._prepare),
            branches=params.n_branches,
        )

    @classmethod
    def for_head(
        cls,
        kind: str,
        params: HeadParams,
        resources: Resources,
        method: str,
        *,
        timed: bool = True,
        what: str = "",
    ) -> HeadDrafter:
        """A drafter with the loaded head of the given kind.

        timed  weigh drafting time, see ``level_time`` above
        what   name of the head in the error message

        Raises MissingResource if no such head is loaded.
        """
        head, contexts = resources.require_heads(kind, method, what), resources.seat.head_contexts
        if head not in contexts:
            contexts[head] = _make_context(head)
        return cls(
            params,
            contexts[head],
            acceptance=resources.acceptance(kind),
            level_time=LevelTime.of(kind, resources) if timed else None,
        )

    def _prepare(self) -> None:
        """Set the sizes of the text's trees. Until it begins, others may be in the context."""
        params, context = self.params, self._context
        context.window, context.n_leaves = params.window, params.width
        context.depth = min(params.depth, context.max_depth)

    def begin(self, prompt: Sequence[int]) -> None:
        self._prepare()
        if not self._context.has_begun(prompt):
            self._context.begin(prompt[:-1])

    def observe(self, step: Step) -> None:
        super().observe(step)
        for node in step.path:
            self._context.add_state(self._last, step.output, node)
            self._last += 1

    def _grow(
        self, growth: Growth, tokens: Sequence[int], budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        self._last = len(tokens) - 1
        root = yield from self._context.root(tokens)
        self._began = own_time.now()
        return () if root is None else (yield from self._grow_below(*root, growth, budget))

    def _grow_below(
        self, output: Scores, row: int, growth: Growth, budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        """Grow the tree from the root, whose logits are in ``row``; see ``_grow``."""
        params, context = self.params, self._context
        assert isinstance(params, GrownParams), "subclasses with other parameters override this"
        p_min = 0.0 if budget.min_path_prob else params.p_min
        yield from growth.levels(
            lambda node, logits: growth.add_likely(node, context.top(logits, params.top_k), p_min),
            context.level,
            output,
            row,
            depth=min(context.depth, budget.max_depth),
            width=min(params.width, context.head.context.n_seq_max),
        )
        return growth.likeliest(min(params.nodes, budget.max_nodes))


class _PromptReader:
    """Reads a text's prompt for a head's context, which is prepared for the text first."""

    def __init__(self, context: TreeDraftContext, prepare: Callable[[], None]) -> None:
        self.needs_hidden, self.needs_layers = context.needs_hidden, context.needs_layers
        self.read = context.read
        self._context, self._prepare = context, prepare

    def begin(self, tokens: Sequence[int]) -> int:
        self._prepare()
        return self._context.begin(tokens)


def _make_context(head: HeadInContext) -> TreeDraftContext:
    """Create the right kind of context for a head."""
    if isinstance(head, DFlashHead):
        return BlockContext(head)
    return AttachedHeadContext(head) if head.attends_to_target else HeadContext(head)
