"""EAGLE: a head foretells the target's states, one after the other, and so its tokens.

EAGLE-1 drafts a tree of fixed shape (Li et al. 2024, arXiv 2401.15077). EAGLE-2 lets the tree
follow the head's confidence: of each level the likeliest paths are expanded, and of everything
found the best nodes are kept (Li et al. 2024, arXiv 2406.16858). EAGLE-3 grows the same tree with
another head, over states of three layers (Li et al. 2025, arXiv 2503.01840). A model's own layer
for multi-token prediction is such a head as well, here mostly with chains. All draft level by level
in the head's own context, which then takes in the true states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from batching.cache import StateReader
from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.block_levels import BlockLevels
from speculation.confidence import Confidence, LevelTime
from speculation.drafter import Step
from speculation.estimates import Estimates
from speculation.growth import Candidate, Scores, below, best_nodes, grow, grow_static, hang
from speculation.head_levels import AttachedLevels, HeadLevels
from speculation.heads.tree import Choices, Path, n_leaves, parse_choices, show_choices
from speculation.ranges import check_ranges

MAX_WIDTH = 16  # nodes of a level that are expanded: sequences of the head's context
MAX_DEPTH = 16
# The tree of EAGLE-1's published program: 25 nodes, five levels.
PUBLISHED = (
    "0.0.0.0.0/0.0.0.0.1/0.0.0.1/0.0.0.2/0.0.1/0.0.2/0.1.0/0.1.1/0.2.0/0.2.1/1.0.0/1.1/2.0/2.1/3.0"
)


@dataclass(frozen=True)
class Eagle1Params:
    """Which candidates are drafted.

    choices  the tree, as paths of ranks: 0.0.0/1.0 goes three deep along the first choices and two
             deep along the second; candidates on the way to a path's end are part of it
    window   tokens at the end of a prompt that the head sees; the target gives their states while
             it reads them, which costs their output. 0 = none: drafting begins with the second step
    """

    choices: Choices = PUBLISHED
    window: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", show_choices(parse_choices(self.choices)))
        _check_window(self.window)
        if self.depth > MAX_DEPTH:
            raise InvalidParameter(f"choices go {self.depth} deep; give {MAX_DEPTH} at most")
        if self.width > MAX_WIDTH:
            raise InvalidParameter(
                f"choices expand {self.width} nodes of a level; give {MAX_WIDTH} at most"
            )

    @property
    def shape(self) -> tuple[Path, ...]:
        return parse_choices(self.choices)

    @property
    def depth(self) -> int:
        return len(self.shape[-1])

    @property
    def width(self) -> int:
        """Nodes of a level that have children, at most."""
        inner = {path[:-1] for path in self.shape}
        return max(Counter(map(len, inner)).values())

    @property
    def n_branches(self) -> int:
        return n_leaves(self.shape)


@dataclass(frozen=True)
class Eagle2Params:
    """How far and how broadly the head drafts, and what is kept of it.

    depth   levels: draft tokens in a row
    top_k   nodes of a level that are expanded, and drafts looked at below each
    nodes   draft tokens of the tree: of all that were looked at those with the likeliest paths
    p_min   least probability that the head must give a draft
    window  tokens at the end of a prompt that the head sees; the target gives their states while
            it reads them, which costs their output. 0 = none: drafting begins with the second step
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
        _check_window(self.window)

    @property
    def width(self) -> int:
        return self.top_k

    @property
    def n_branches(self) -> int:
        return 0 if self.top_k == 1 else self.nodes


@dataclass(frozen=True)
class MtpParams(Eagle2Params):
    """How far and how broadly the model's own prediction layer drafts, and what is kept of it.

    depth   levels: draft tokens in a row; the layer was trained for the first
    top_k   nodes of a level that are expanded, and drafts looked at below each
    nodes   draft tokens of the tree: of all that were looked at those with the likeliest paths
    p_min   least probability that the layer must give a draft; auto goes by costs instead
    window  tokens at the end of a prompt that the layer reads as well. 0 = none: drafting begins
            with the second step
    """

    depth: int = 6
    top_k: int = 1
    nodes: int = 24
    p_min: float = 0.75
    window: int = 1024


@dataclass(frozen=True)
class DFlashParams(Eagle2Params):
    """How much of a block is drafted, and what is kept of it.

    depth   draft tokens in a row, at most as many as a block of the head has: one less than its
            size, or all of it
    top_k   tokens looked at of each place, and paths that go on to the next: 1 = a chain
    nodes   draft tokens of the tree: of all that were looked at those with the likeliest paths
    p_min   least probability that the head must give a draft
    window  tokens at the end of a prompt that the head sees. 0 = none: drafting begins with the
            second step
    """

    depth: int = 15
    top_k: int = 1
    nodes: int = 24
    p_min: float = 0.0
    window: int = 8192


def _check_window(window: int) -> None:
    if window < 0:
        raise InvalidParameter(f"window is {window}; give 0 or more tokens")


class Eagle:
    """The head's context in step with the text, and a tree of its guesses each step."""

    def __init__(
        self,
        params: Eagle1Params | Eagle2Params,
        levels: HeadLevels | AttachedLevels | BlockLevels,
        *,
        estimates: Estimates | None = None,
        target_seconds: Callable[[], float] | None = None,
    ) -> None:
        """``levels`` is shared with the texts before and after, ``estimates`` may be.

        ``target_seconds`` is what a step of the target costs: where the tree has a floor, drafting
        goes on only while it is worth its own time.
        """
        self.params = params
        self.n_branches = params.n_branches
        self._levels = levels
        self._confidence = Confidence(estimates)
        self._time = LevelTime(target_seconds)
        self._last = 0  # place of the text's last token
        self._depth = levels.prepare(params.window, params.width, params.depth)

    @property
    def needs_hidden(self) -> bool:
        return self._levels.head.needs_hidden

    @property
    def needs_layers(self) -> tuple[int, ...]:
        return self._levels.head.layers

    @property
    def reader(self) -> StateReader:
        """What reads the states of a prompt."""
        return self._levels

    def begin(self, prompt: Sequence[int]) -> None:
        self._confidence.estimates.new_text()
        self._levels.prepare(self.params.window, self.params.width, self.params.depth)
        if not self._levels.follows(prompt):
            self._levels.begin(prompt[:-1])

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        self._last = len(tokens) - 1
        self._confidence.note(())
        start = perf_counter()
        root = self._levels.root(tokens)
        if root is None:
            return  # the first states of a text are still to come, or there is no room
        nodes = self._grow(*root, tree)
        chosen: Sequence[int] = range(len(nodes))
        if isinstance(self.params, Eagle2Params):
            chosen = best_nodes(nodes, min(self.params.nodes, tree.room))
        hang(nodes, chosen, tree, self._confidence.holds)
        self._confidence.note(nodes)
        self._time.took(perf_counter() - start, nodes)

    def observe(self, step: Step) -> None:
        self._confidence.learn(step)
        for node in step.path:
            self._levels.see(self._last, step.output, node)
            self._last += 1

    def _grow(self, output: Scores, row: int, tree: TokenTree) -> list[Candidate]:
        params, levels = self.params, self._levels
        if isinstance(params, Eagle1Params):
            return grow_static(params.shape, levels.top, levels.level, output, row)
        children = below(
            levels.top,
            params.width,
            self._time.floor(tree),
            self._confidence.holds,
            p_min=params.p_min,
        )
        return grow(
            children,
            levels.level,
            output,
            row,
            depth=min(self._depth, tree.max_depth),
            width=params.width,
        )
