"""EAGLE: a head foretells the target's states, one after the other, and so its tokens.

EAGLE-1 drafts a tree of fixed shape (Li et al. 2024, arXiv 2401.15077). EAGLE-2 lets the tree
follow the head's confidence: of each level the likeliest paths are expanded, and of everything
found the best nodes are kept (Li et al. 2024, arXiv 2406.16858). EAGLE-3 grows the same tree with
another head, over states of three layers (Li et al. 2025, arXiv 2503.01840). All draft level by
level in the head's own context, which then takes in the true states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import AsSource, DraftBudget, MethodSpec
from speculation.drafting.head_drafter import (
    MAX_DEPTH,
    MAX_WIDTH,
    GrownParams,
    HeadDrafter,
    check_window,
)
from speculation.drafting.tree_growth import Candidate, Scores, grow_static
from speculation.heads.tree import Choices, Path, n_leaves, parse_choices, show_choices
from speculation.resources import Resources

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
        check_window(self.window)
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
class Eagle2Params(GrownParams):
    """How far and how broadly the head drafts, and what is kept of it.

    depth   levels: draft tokens in a row
    top_k   nodes of a level that are expanded, and drafts looked at below each
    nodes   draft tokens of the tree: of all that were looked at those with the likeliest paths
    p_min   least probability that the head must give a draft
    window  tokens at the end of a prompt that the head sees; the target gives their states while
            it reads them, which costs their output. 0 = none: drafting begins with the second step
    """


class FixedTreeDrafter(HeadDrafter):
    """EAGLE-1: the tree has a fixed shape, whatever the head's confidence."""

    def _look(
        self, output: Scores, row: int, tree: TokenTree, budget: DraftBudget
    ) -> tuple[list[Candidate], Sequence[int]]:
        assert isinstance(self.params, Eagle1Params)
        levels = self._levels
        nodes = grow_static(self.params.shape, levels.top, levels.level, output, row)
        return nodes, range(len(nodes))


def _source_params(kind: str, resources: Resources) -> Eagle2Params | None:
    return Eagle2Params() if kind in resources.heads else None


eagle_1 = MethodSpec(
    name="eagle-1",
    title="EAGLE-1",
    params=Eagle1Params,
    make=lambda params, resources: FixedTreeDrafter.over("eagle", params, resources, "eagle-1"),
)
eagle_2 = MethodSpec(
    name="eagle-2",
    title="EAGLE-2",
    params=Eagle2Params,
    make=lambda params, resources: HeadDrafter.over("eagle", params, resources, "eagle-2"),
    as_source=AsSource(partial(_source_params, "eagle"), name="eagle"),
)
eagle_3 = MethodSpec(
    name="eagle-3",
    title="EAGLE-3",
    params=Eagle2Params,
    make=lambda params, resources: HeadDrafter.over("eagle-3", params, resources, "eagle-3"),
    as_source=AsSource(partial(_source_params, "eagle-3")),
)
