"""Which drafts to decode: the set with the most expected tokens per second. Pure.

A node is accepted with its path probability, the product of the estimates from the root down. So a
step with the nodes S yields 1 + sum of their path probabilities in expectation, at c(1 + |S|).
Path probabilities fall along every path. The n most probable nodes therefore form a tree, no set of
n yields more, and only the numbers n have to be compared: what this finds is what exhaustive search
finds. Plain decoding is n = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from batching.tree import TokenTree


def path_probs(tree: TokenTree) -> list[float]:
    """Estimated probability that each node is accepted; 1 for the root."""
    found = [1.0]
    for parent, prob in zip(tree.parents[1:], tree.probs[1:], strict=True):
        found.append(found[parent] * prob)
    return found


def likeliest_path(tree: TokenTree) -> list[int]:
    """The path with the most expected tokens, without the root: all that can be decoded of the tree
    where the target has but one sequence.

    Of drafts that were drawn it is the one drawn first at each node: a path that is taken for what
    was drawn would be no sample.
    """
    if tree.draft_probs:
        path, end = [0], tree.n_drafted + 1
        while path[-1] in tree.parents[path[-1] + 1 : end]:
            path.append(tree.parents.index(path[-1], path[-1] + 1, end))
        return path[1:]
    expected = [0.0]  # tokens of the path that ends with a node
    probs = path_probs(tree)
    for node in range(1, tree.n_drafted + 1):
        expected.append(expected[tree.parents[node]] + probs[node])
    return tree.path_to(expected.index(max(expected)))[1:]


def choose(
    tree: TokenTree,
    cost: Sequence[float],
    *,
    last_rows: int = 0,
    switch_seconds: float = 0.0,
    overhead_seconds: float = 0.0,
    margin: float = 0.0,
    max_nodes: int | None = None,
    max_leaves: int | None = None,
) -> list[int]:
    """The nodes beside the root that are worth decoding, ascending.

    cost              seconds for a batch of 0, 1, 2, … rows; as many rows as it covers at most
    last_rows         rows of the step before: another number costs ``switch_seconds`` more; 0 where
                      every number is another
    overhead_seconds  what a step costs whatever its rows
    margin            by so much more tokens per second, as a share, drafts must beat plain decoding
    max_nodes         most nodes beside the root
    max_leaves        most ends of branches; where more would pay, the least probable nodes go

    None is deeper than the text has tokens left for. Of a tree that is to be one path they are the
    beginning of the likeliest.
    """
    n_nodes = len(tree) - 1
    most = len(cost) - 2 if max_nodes is None else min(max_nodes, len(cost) - 2)
    if tree.depths[-1] == n_nodes or tree.one_path:  # path probabilities descend already
        path = range(1, n_nodes + 1) if tree.depths[-1] == n_nodes else likeliest_path(tree)
        path = path[: min(most, tree.max_depth)]
        chain = list(accumulate([tree.probs[node] for node in path], mul))
        n = best_count(chain, cost, last_rows, switch_seconds, overhead_seconds, margin)
        return list(path[:n])
    probs = path_probs(tree)
    nodes: Sequence[int] = range(1, n_nodes + 1)
    if tree.max_depth < n_nodes:
        nodes = [node for node in nodes if tree.depths[node] <= tree.max_depth]
    order = sorted(nodes, key=probs.__getitem__, reverse=True)  # parents first
    n = best_count(
        [probs[node] for node in order[:most]],
        cost,
        last_rows,
        switch_seconds,
        overhead_seconds,
        margin,
    )
    chosen = order[:n]
    if max_leaves is not None and n > max_leaves:
        while len(set(chosen) - {tree.parents[node] for node in chosen}) > max_leaves:
            chosen.pop()
    chosen.sort()
    return chosen


def best_count(
    probs: Sequence[float],
    cost: Sequence[float],
    last_rows: int = 0,
    switch_seconds: float = 0.0,
    overhead_seconds: float = 0.0,
    margin: float = 0.0,
) -> int:
    """How many of the path probabilities ``probs``, which descend, to take."""
    expected, best = 1.0, 0
    plain = cost[1] + overhead_seconds + (switch_seconds if last_rows != 1 else 0.0)
    best_rate = (1.0 + margin) / plain
    for n, p in enumerate(probs, 1):
        expected += p
        seconds = cost[n + 1] + overhead_seconds
        if n + 1 != last_rows:
            seconds += switch_seconds
        rate = expected / seconds
        if rate > best_rate:
            best_rate, best = rate, n
    return best


def ample_rows(cost: Sequence[float], overhead_seconds: float = 0.0) -> int:
    """As many rows as can pay: were all of them certain, more would gain 2% at most.

    ``cost`` and ``overhead_seconds`` are as in ``choose``.
    """
    rates = [rows / (seconds + overhead_seconds) for rows, seconds in enumerate(cost[1:], 1)]
    enough = 0.98 * max(rates)
    return next(rows for rows, rate in enumerate(rates, 1) if rate >= enough)
