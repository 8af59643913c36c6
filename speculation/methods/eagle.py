"""EAGLE: a head predicts the target's states autoregressively, and the tokens from them.

EAGLE-1 drafts a tree of fixed shape (Li et al. 2024, arXiv 2401.15077). EAGLE-2's tree follows the
head's confidence: the likeliest paths of each level are expanded, and the best of all nodes are
kept (Li et al. 2024, arXiv 2406.16858). EAGLE-3 grows the same tree with another head, which reads
three layers' states (Li et al. 2025, arXiv 2503.01840). All draft level by level in the head's own
context, and then replace the predicted states by the true ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.together import Coroutine
from batching.tree import NO_LIMIT, Floats
from speculation.drafter import AsSource, DraftBudget, MethodSpec
from speculation.drafting.head_drafter import (
    MAX_DEPTH,
    MAX_WIDTH,
    WINDOW,
    GrownParams,
    HeadDrafter,
)
from speculation.drafting.resources import if_loaded
from speculation.drafting.tree_growth import Growth, Scores
from speculation.heads.eagle import KIND as EAGLE
from speculation.heads.eagle3 import KIND as EAGLE_3
from speculation.system.params import Params, param

Path = tuple[int, ...]  # ranks: (0, 2) is the third choice below the first choice
MAX_NODES = 255  # each may need a sequence, and llama.cpp has 256
MAX_RANK = 63
# The tree of EAGLE-1's published code: 25 nodes, five levels.
PUBLISHED = (
    "0.0.0.0.0/0.0.0.0.1/0.0.0.1/0.0.0.2/0.0.1/0.0.2/0.1.0/0.1.1/0.2.0/0.2.1/1.0.0/1.1/2.0/2.1/3.0"
)


def parse_choices(choices: str) -> tuple[Path, ...]:
    """The nodes of a fixed tree, parents first and siblings by rank, from paths of ranks.

    All prefixes of a path are included. (Medusa and TensorRT-LLM write such trees as lists,
    ``medusa_choices``.) Raises InvalidParameter.

    >>> parse_choices("0.1/1")
    ((0,), (1,), (0, 1))
    """
    nodes: set[Path] = set()
    for part in choices.split("/"):
        ranks = part.strip().split(".")
        if not all(rank.isdecimal() and len(rank) < 3 and int(rank) <= MAX_RANK for rank in ranks):
            raise InvalidParameter(
                f"choices has {part!r}; give paths of ranks like 0.0.0.0/0.1.0/1.0/1.1, from 0, "
                f"the likeliest, to {MAX_RANK}"
            )
        path = tuple(map(int, ranks))
        nodes.update(path[: n + 1] for n in range(len(path)))
    if len(nodes) > MAX_NODES:
        raise InvalidParameter(f"choices has {len(nodes)} nodes; the limit is {MAX_NODES}")
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class Eagle1Params(Params):
    """The shape of the fixed tree."""

    choices: str = param(
        PUBLISHED,
        "the tree, as paths of ranks: 0.0.0/1.0 goes three deep along the first choices and two "
        "deep along the second; all prefixes of a path are included",
    )
    window: int = param(64, WINDOW, (0, NO_LIMIT))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth > MAX_DEPTH:
            raise InvalidParameter(f"choices go {self.depth} deep; the limit is {MAX_DEPTH}")
        if self.width > MAX_WIDTH:
            raise InvalidParameter(
                f"choices expand {self.width} nodes of a level; the limit is {MAX_WIDTH}"
            )

    @property
    def shape(self) -> tuple[Path, ...]:
        return parse_choices(self.choices)

    @property
    def depth(self) -> int:
        return len(self.shape[-1])

    @property
    def width(self) -> int:
        """Most nodes with children in one level."""
        inner = {path[:-1] for path in self.shape}
        return max(Counter(map(len, inner)).values())

    @property
    def n_branches(self) -> int:
        return len(set(self.shape) - {path[:-1] for path in self.shape})


class FixedTreeDrafter(HeadDrafter):
    """EAGLE-1: a tree of fixed shape, independent of the head's confidence."""

    def _grow_below(
        self, output: Scores, row: int, growth: Growth, budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        assert isinstance(self.params, Eagle1Params)
        context, params, shape = self._context, self.params, self.params.shape
        paths: list[Path] = [()]  # of the nodes
        inner = {path[:-1] for path in shape}

        def add_below(node: int, logits: Floats) -> None:
            ranks = [path[-1] for path in shape if path[:-1] == paths[node]]
            for rank, (token, prob) in enumerate(context.top(logits, max(ranks) + 1)):
                if rank in ranks and growth.add(node, token, prob):
                    paths.append((*paths[node], rank))

        yield from growth.levels(
            add_below,
            context.level,
            output,
            row,
            depth=params.depth,
            width=params.width,
            expands=lambda node: paths[node] in inner,
        )
        return range(1, len(growth.tree))


eagle_1 = MethodSpec(
    name="eagle-1",
    title="EAGLE-1",
    params=Eagle1Params,
    make=lambda params, resources: FixedTreeDrafter.for_head(
        EAGLE.method, params, resources, "eagle-1"
    ),
    heads=(EAGLE,),
)
eagle_2 = MethodSpec(
    name="eagle-2",
    title="EAGLE-2",
    params=GrownParams,
    make=lambda params, resources: HeadDrafter.for_head(EAGLE.method, params, resources, "eagle-2"),
    as_source=AsSource(if_loaded(EAGLE.method, GrownParams()), name="eagle"),
    heads=(EAGLE,),
)
eagle_3 = MethodSpec(
    name="eagle-3",
    title="EAGLE-3",
    params=GrownParams,
    make=lambda params, resources: HeadDrafter.for_head(
        EAGLE_3.method, params, resources, "eagle-3"
    ),
    as_source=AsSource(if_loaded(EAGLE_3.method, GrownParams())),
    heads=(EAGLE_3,),
)
