"""Static draft trees: parses and prints ``choices``, and finds the best tree for given accuracies.

A node is the path of ranks that leads to it: (0, 2) is the third choice of the second head, below
the first choice of the first head. Head k (from 0) predicts the token k + 2 positions after the
hidden state it takes. The root is the token right after that state, so head k's candidates have
depth k + 1. Medusa (Cai et al. 2024, arXiv 2401.10774) and TensorRT-LLM call these trees
``medusa_choices``. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from batching.errors import InvalidParameter
from batching.tree import Floats

Path = tuple[int, ...]
MAX_NODES = 255  # each may need a sequence, and llama.cpp has 256
MAX_RANK = 63


def parse_choices(choices: str | Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """The nodes of a tree, parents first and siblings by rank.

    ``choices`` are paths of ranks, as a list or a string. All prefixes of a path are included.
    Raises InvalidParameter naming the invalid path.

    >>> parse_choices("0.1/1")
    ((0,), (1,), (0, 1))
    """
    paths = _read(choices) if isinstance(choices, str) else [tuple(path) for path in choices]
    seen: set[Path] = set()
    for path in paths:
        if not path:
            raise InvalidParameter("choices has an empty path; remove it, the root is implied")
        for rank in path:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_RANK:
                raise InvalidParameter(
                    f"choices has {rank!r} in {_show(path)}; give ranks from 0, the likeliest, "
                    f"to {MAX_RANK}"
                )
        if path in seen:
            raise InvalidParameter(f"choices has the path {_show(path)} twice; give it once")
        seen.add(path)
    nodes = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    if len(nodes) > MAX_NODES:
        raise InvalidParameter(f"choices has {len(nodes)} nodes; the limit is {MAX_NODES}")
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


def show_choices(nodes: Iterable[Path]) -> str:
    """The shortest string for a tree: the paths to its leaves.

    >>> show_choices([(0,), (1,), (0, 1)])
    '0.1/1'
    """
    nodes = set(nodes)
    inner = {path[:-1] for path in nodes}
    return "/".join(_show(path) for path in sorted(nodes - inner))


class Choices(str):
    """A tree as a parameter: the string of ``show_choices``, however it was given; "" = none.

    >>> Choices([(0,), (1,), (0, 1)]) == Choices("1/0.1/0") == "0.1/1"
    True
    """

    __slots__ = ()

    def __new__(cls, choices: str | Sequence[Sequence[int]] = "") -> Choices:
        """Raises InvalidParameter as ``parse_choices``."""
        return super().__new__(cls, show_choices(parse_choices(choices)) if choices else "")


def best_tree(accuracy: Floats, n_nodes: int) -> tuple[Path, ...]:
    """The tree with the most expected tokens among those of up to ``n_nodes`` nodes.

    ``accuracy[k, r]``, (n_heads, n_ranks), is the accuracy of choice r of head k. A node is
    accepted with the product of the accuracies along its path (Medusa, section 2.3.3). Since no
    child is likelier than its parent, the likeliest nodes form a tree, and greedy search finds the
    optimum. Nodes of probability 0 are left out.
    """
    n_heads, n_ranks = accuracy.shape
    nodes: list[Path] = []
    heap: list[tuple[float, Path]] = []

    def push_children(path: Path, path_prob: float) -> None:
        if len(path) < n_heads:
            for rank in range(n_ranks):
                p = path_prob * float(accuracy[len(path), rank])
                if p > 0:
                    heapq.heappush(heap, (-p, (*path, rank)))

    push_children((), 1.0)
    while heap and len(nodes) < n_nodes:
        negative, path = heapq.heappop(heap)
        nodes.append(path)
        push_children(path, -negative)
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


def expected_tokens(accuracy: Floats, nodes: Iterable[Path]) -> float:
    """Expected tokens per step: 1, plus each node's path probability, see ``best_tree``."""
    return 1.0 + sum(
        math.prod(float(accuracy[depth, rank]) for depth, rank in enumerate(path)) for path in nodes
    )


def n_leaves(nodes: Sequence[Path]) -> int:
    """Number of nodes without children."""
    return len(set(nodes) - {path[:-1] for path in nodes})


def assumed_accuracy(n_heads: int, n_ranks: int) -> Floats:
    """Accuracies to assume for heads without measured ones, (n_heads, n_ranks).

    0.5 for the first head's first choice and 0.1 for its second. Each further rank, and each
    further head, has 2/3 of the one before.
    """
    heads, ranks = np.arange(n_heads)[:, None], np.arange(n_ranks)[None]
    accuracy: Floats = (0.5 * (2 / 3) ** (heads + ranks) * np.where(ranks, 0.3, 1.0)).astype(
        np.float32
    )
    return accuracy


def _read(text: str) -> list[Path]:
    paths = []
    for part in text.split("/"):
        ranks = part.strip().split(".")
        if not all(rank.isdecimal() for rank in ranks):
            raise InvalidParameter(
                f"choices has {part!r}; give paths of ranks like 0.0.0.0/0.1.0/1.0/1.1"
            )
        paths.append(tuple(map(int, ranks)))
    return paths


def _show(path: Path) -> str:
    return ".".join(map(str, path))
