"""Which ranks of which heads a tree is made of: how they are written, checked and chosen. Pure.

Head k (from 0) guesses the token k + 2 places after the state it reads, so below the root, which is
the token right after that state, its candidates are the nodes of depth k + 1. A node is the path of
ranks that leads to it: (0, 2) is the third choice of the second head below the first choice of the
first. ``medusa_choices`` in Medusa (Cai et al. 2024, arXiv 2401.10774) and in TensorRT-LLM.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from batching.errors import InvalidParameter
from batching.tree import Floats

Path = tuple[int, ...]
Choices = str | Sequence[Sequence[int]]
MAX_NODES = 255  # each needs a sequence at worst, and llama.cpp has 256
MAX_RANK = 63


def parse_choices(choices: Choices) -> tuple[Path, ...]:
    """The nodes of a tree, parents first and siblings by rank.

    ``choices`` are paths of ranks, as a list or written ``0.0.0.0/0.1.0/1.0/1.1``. Whole paths
    will do: the candidates on the way to their ends are part of the tree, listed or not.

    Raises InvalidParameter naming the path that is wrong.
    """
    paths = _read(choices) if isinstance(choices, str) else [tuple(path) for path in choices]
    seen: set[Path] = set()
    for path in paths:
        if not path:
            raise InvalidParameter("choices has an empty path; the root is in every tree, leave it")
        for rank in path:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_RANK:
                raise InvalidParameter(
                    f"choices has {rank!r} in {_show(path)}; give ranks from 0, the likeliest, "
                    f"to {MAX_RANK}"
                )
        if path in seen:
            raise InvalidParameter(f"choices has the path {_show(path)} twice; leave one out")
        seen.add(path)
    nodes = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    if len(nodes) > MAX_NODES:
        raise InvalidParameter(f"choices make {len(nodes)} nodes; give {MAX_NODES} at most")
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


def show_choices(nodes: Iterable[Path]) -> str:
    """The shortest way to write a tree: the paths to its leaves."""
    nodes = set(nodes)
    inner = {path[:-1] for path in nodes}
    return "/".join(_show(path) for path in sorted(nodes - inner))


def best_tree(accuracy: Floats, n_nodes: int) -> tuple[Path, ...]:
    """The tree of ``n_nodes`` with the most expected tokens, or of as many as there are.

    ``accuracy[k, r]``, (n_heads, n_ranks), is how often choice r of head k is right. A node is
    accepted with the product along its path, as in Medusa's paper, section 2.3.3. No child can be
    likelier than its parent, so the likeliest nodes of all form a tree: taking the best that is
    open, one after the other, finds what exhaustive search finds. Nodes that are never right are
    left out.
    """
    n_heads, n_ranks = accuracy.shape
    found: list[Path] = []
    open_nodes: list[tuple[float, Path]] = []

    def open_below(path: Path, reached: float) -> None:
        if len(path) < n_heads:
            for rank in range(n_ranks):
                p = reached * float(accuracy[len(path), rank])
                if p > 0:
                    heapq.heappush(open_nodes, (-p, (*path, rank)))

    open_below((), 1.0)
    while open_nodes and len(found) < n_nodes:
        negative, path = heapq.heappop(open_nodes)
        found.append(path)
        open_below(path, -negative)
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def expected_tokens(accuracy: Floats, nodes: Iterable[Path]) -> float:
    """Tokens of a step with this tree: one, and each node with the product along its path."""
    return 1.0 + sum(
        math.prod(float(accuracy[depth, rank]) for depth, rank in enumerate(path)) for path in nodes
    )


def n_leaves(nodes: Sequence[Path]) -> int:
    """Paths that are not the beginning of another."""
    return len(set(nodes) - {path[:-1] for path in nodes})


def assumed_accuracy(n_heads: int, n_ranks: int) -> Floats:
    """How often heads are right where nobody has measured it.

    The first choice of the first head half of the time, its second a fifth of that, each further
    rank and each further head two thirds of the one before.
    """
    heads, ranks = np.arange(n_heads)[:, None], np.arange(n_ranks)[None]
    found: Floats = (0.5 * (2 / 3) ** (heads + ranks) * np.where(ranks, 0.3, 1.0)).astype(
        np.float32
    )
    return found


def _read(text: str) -> list[Path]:
    paths = []
    for part in text.split("/"):
        ranks = part.strip().split(".")
        if not all(rank.isdecimal() for rank in ranks):
            raise InvalidParameter(
                f"choices has {part!r}; write paths of ranks like 0.0.0.0/0.1.0/1.0/1.1"
            )
        paths.append(tuple(map(int, ranks)))
    return paths


def _show(path: Path) -> str:
    return ".".join(map(str, path))
