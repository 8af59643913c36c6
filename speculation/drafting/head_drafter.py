"""HeadDrafter: drafts from a head that is fed with the target's states, whatever kind it is.

The tree follows the head's confidence, as EAGLE-2's does (Li et al. 2024, arXiv 2406.16858): of
each level the likeliest paths go on, and of everything found the best nodes are kept. Where the
levels come from is the head's affair: from its own guesses, one after the other (``head_levels``),
or from the places of a block that it drafted at once (``block_levels``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, Requirements, Step
from speculation.drafting.block_context import BlockContext
from speculation.drafting.confidence import PRIORS, Confidence, LevelTime
from speculation.drafting.estimates import Estimates
from speculation.drafting.head_context import AttachedHeadContext, HeadContext
from speculation.drafting.tree_growth import (
    Candidate,
    Children,
    Scores,
    Top,
    add_to_tree,
    below,
    best_nodes,
    grow,
)
from speculation.ranges import check_ranges
from speculation.resources import Resources

MAX_WIDTH = 16  # nodes of a level that are expanded: sequences of the head's context
MAX_DEPTH = 16

TreeDraftContext = HeadContext | AttachedHeadContext | BlockContext


class HeadParams(Protocol):
    """What all have of parameters: ``window`` tokens of a prompt, trees of such a size."""

    @property
    def window(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def n_branches(self) -> int: ...


@dataclass(frozen=True)
class GrownParams:
    """How far and how broadly a head drafts, and what is kept of it.

    depth   levels: draft tokens in a row
    top_k   nodes of a level that go on, and drafts looked at below each
    nodes   draft tokens of the tree: of all that were looked at those with the likeliest paths
    p_min   least probability that the head must give a draft
    window  tokens at the end of a prompt that the head sees
    """

    depth: int = 5
    top_k: int = 8
    nodes: int = 24
    p_min: float = 0.0
    window: int = 64

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("depth", 1, MAX_DEPTH),
                ("top_k", 1, MAX_WIDTH),
                ("nodes", 1, 255),
                ("p_min", 0.0, 1.0),
            ),
        )
        check_window(self.window)

    @property
    def width(self) -> int:
        return self.top_k

    @property
    def n_branches(self) -> int:
        return 0 if self.top_k == 1 else self.nodes


def check_window(window: int) -> None:
    """Raise InvalidParameter for less than no tokens."""
    if window < 0:
        raise InvalidParameter(f"window is {window}; give 0 or more tokens")


class SearchingDrafter(Drafter):
    """Base of drafters whose head gives candidates below the last token, level by level.

    It calibrates the head's probabilities by what became of the candidates, and weighs drafting
    time. A subclass has ``_search``.
    """

    def __init__(
        self,
        estimates: Estimates | None = None,
        target_seconds: Callable[[], float] | None = None,
    ) -> None:
        """``estimates`` may be shared with the texts before.

        ``target_seconds`` is what a step of the target costs: under a least path probability,
        drafting goes on only while it is worth its own time.
        """
        self._confidence = Confidence(estimates)
        self._time = LevelTime(target_seconds)

    def begin(self, prompt: Sequence[int]) -> None:
        self._confidence.estimates.new_text()

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._confidence.note(())
        start = perf_counter()
        found = self._search(tokens, tree, budget)
        if found is None:
            return
        nodes, chosen = found
        add_to_tree(nodes, chosen, tree, budget, self._confidence.holds)
        self._confidence.note(nodes)
        self._time.took(perf_counter() - start, nodes)

    def observe(self, step: Step) -> None:
        self._confidence.learn(step)

    def _search(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> tuple[list[Candidate], Sequence[int]] | None:
        """The candidates of this step, and which of them to draft.

        None where the head cannot draft: the first states of a text are still to come, or there is
        no room.
        """
        raise NotImplementedError

    def _children(self, top: Top, width: int, budget: DraftBudget, p_min: float = 0.0) -> Children:
        """What finds the ``width`` likeliest candidates below a row, by calibrated confidence."""
        least = self._time.least_path_prob(budget)
        return below(top, width, least, self._confidence.holds, p_min=p_min)


class HeadDrafter(SearchingDrafter):
    """The head's context in step with the text, and a tree of its guesses each step."""

    def __init__(
        self,
        params: HeadParams,
        levels: TreeDraftContext,
        *,
        estimates: Estimates | None = None,
        target_seconds: Callable[[], float] | None = None,
    ) -> None:
        """``levels`` is shared with the texts before and after; see the base for the others."""
        super().__init__(estimates, target_seconds)
        self.params = params
        self._levels = levels
        self._last = 0  # place of the text's last token
        self._depth = levels.prepare(params.window, params.width, params.depth)
        self.requires = Requirements(
            hidden=levels.head.needs_hidden,
            layers=levels.head.layers,
            prompt_reader=levels,
            branches=params.n_branches,
        )

    @classmethod
    def over(
        cls,
        kind: str,
        params: HeadParams,
        resources: Resources,
        method: str,
        *,
        timed: bool = True,
        what: str = "",
    ) -> HeadDrafter:
        """A drafter with the loaded head of a kind.

        ``timed`` weighs drafting time, as ``target_seconds`` above; ``what`` the head is called in
        the error where none was loaded.

        Raises MissingResource when no such head was loaded.
        """
        head = resources.require_heads(kind, method, what)
        return cls(
            params,
            resources.keep(("head context", kind), lambda: _context_of(head)),
            estimates=resources.keep(("estimates", kind), lambda: Estimates(PRIORS)),
            target_seconds=resources.step_seconds if timed else None,
        )

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._levels.prepare(self.params.window, self.params.width, self.params.depth)
        if not self._levels.follows(prompt):
            self._levels.begin(prompt[:-1])

    def observe(self, step: Step) -> None:
        super().observe(step)
        for node in step.path:
            self._levels.see(self._last, step.output, node)
            self._last += 1

    def _search(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> tuple[list[Candidate], Sequence[int]] | None:
        self._last = len(tokens) - 1
        root = self._levels.root(tokens)
        return None if root is None else self._look(*root, tree, budget)

    def _look(
        self, output: Scores, row: int, tree: TokenTree, budget: DraftBudget
    ) -> tuple[list[Candidate], Sequence[int]]:
        """The candidates below the root, whose logits are in ``row``, and those to be drafted."""
        params, levels = self.params, self._levels
        assert isinstance(params, GrownParams), "others have their own way to look"
        children = self._children(levels.top, params.width, budget, params.p_min)
        depth = min(self._depth, budget.max_depth)
        nodes = grow(children, levels.level, output, row, depth=depth, width=params.width)
        return nodes, best_nodes(nodes, min(params.nodes, budget.room(tree)))


def _context_of(head: Any) -> TreeDraftContext:
    """The kind of context that drafts with a head."""
    if head.drafts_blocks:
        return BlockContext(head)
    return AttachedHeadContext(head) if head.attends_to_target else HeadContext(head)
