"""HeadDrafter: drafts with any head that takes the target's states as input.

The tree follows the head's confidence, as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the
likeliest paths of each level are expanded, and the best of all nodes are kept. The levels come from
successive decodes of the head (``head_context``) or from the positions of one block
(``block_context``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from batching.errors import CacheFull
from batching.together import Coroutine, own_time
from batching.tree import NO_LIMIT, TokenTree
from speculation.drafter import DraftBudget, Drafter, Requirements, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.block_context import BlockContext
from speculation.drafting.confidence import Confidence, LevelTime
from speculation.drafting.head_context import AttachedHeadContext, HeadContext
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import (
    Candidate,
    Children,
    Scores,
    Top,
    add_to_tree,
    best_nodes,
    grow,
    top_children,
)
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


class TreeDrafter(Drafter):
    """Base of drafters whose model or head yields a tree of candidates below the last token.

    Calibrates its probabilities and weighs drafting time. Subclasses implement ``_search``.
    """

    def __init__(
        self,
        acceptance: Acceptance | None = None,
        level_time: LevelTime | None = None,
    ) -> None:
        """With ``level_time``, and if the budget has a minimum path probability, drafting stops
        when it is no longer worth its time."""
        self._confidence = Confidence(acceptance)
        self._time = level_time or LevelTime()
        self._began = 0.0  # to grow a tree, once its root is decoded

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        self._confidence.set_candidates(())
        self._began = own_time.now()
        try:
            result = yield from self._search(tokens, tree, budget)
        except CacheFull:  # other texts have its cells
            return
        if result is None:
            return
        nodes, chosen = result
        add_to_tree(nodes, chosen, tree, budget, self._confidence.acceptance_prob)
        self._confidence.set_candidates(nodes)
        self._time.record(own_time.now() - self._began, nodes)

    def observe(self, step: Step) -> None:
        self._confidence.learn(step)

    def _search(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> Coroutine[tuple[list[Candidate], Sequence[int]] | None]:
        """All candidates, and the indexes of those to draft.

        None if the head cannot draft: no state yet, or its context is full.
        """
        raise NotImplementedError

    def _children(self, top: Top, width: int, budget: DraftBudget, p_min: float = 0.0) -> Children:
        """Children = the ``width`` likeliest tokens, with calibrated path probabilities."""
        floor = self._time.min_path_prob(budget)
        return top_children(top, width, floor, self._confidence.acceptance_prob, p_min=p_min)


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
        self._depth = 0  # of its trees, once a text begins: until then others may be in the context
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
        head = resources.require_heads(kind, method, what)
        return cls(
            params,
            resources.keep(("head context", head), lambda: _make_context(head)),
            acceptance=resources.acceptance(kind),
            level_time=LevelTime.of(kind, resources) if timed else None,
        )

    def _prepare(self) -> None:
        params = self.params
        self._depth = self._context.prepare(params.window, params.width, params.depth)

    def begin(self, prompt: Sequence[int]) -> None:
        self._prepare()
        if not self._context.has_begun(prompt):
            self._context.begin(prompt[:-1])

    def observe(self, step: Step) -> None:
        super().observe(step)
        for node in step.path:
            self._context.add_state(self._last, step.output, node)
            self._last += 1

    def _search(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> Coroutine[tuple[list[Candidate], Sequence[int]] | None]:
        self._last = len(tokens) - 1
        root = yield from self._context.root(tokens)
        self._began = own_time.now()
        return None if root is None else (yield from self._grow(*root, tree, budget))

    def _grow(
        self, output: Scores, row: int, tree: TokenTree, budget: DraftBudget
    ) -> Coroutine[tuple[list[Candidate], Sequence[int]]]:
        """Grow the tree from the root, whose logits are in ``row``; see ``_search``."""
        params, context = self.params, self._context
        assert isinstance(params, GrownParams), "subclasses with other parameters override this"
        children = self._children(context.top, params.width, budget, params.p_min)
        depth = min(self._depth, budget.max_depth)
        width = min(params.width, context.head.context.n_seq_max)
        nodes = yield from grow(children, context.level, output, row, depth=depth, width=width)
        return nodes, best_nodes(nodes, min(params.nodes, budget.room(tree)))


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
