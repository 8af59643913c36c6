"""Selection: which drafts to decode, the set with the most expected tokens per second. Pure.

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
from speculation.drafter import DraftBudget


def select(
    tree: TokenTree,
    budget: DraftBudget,
    cost: Sequence[float],
    *,
    last_rows: int = 0,
    switch_seconds: float = 0.0,
    overhead_seconds: float = 0.0,
    margin: float = 0.0,
) -> list[int]:
    """The nodes beside the root that are worth decoding, ascending, within ``budget``.

    cost              seconds for a batch of 0, 1, 2, … rows; as many rows as it covers at most
    last_rows         rows of the step before: another number costs ``switch_seconds`` more; 0 where
                      every number is another
    overhead_seconds  what a step costs whatever its rows
    margin            by so much more tokens per second, as a share, drafts must beat plain decoding

    Where more leaves would pay than ``budget.max_leaves``, the least probable nodes go. With
    ``budget.chain_only`` they are the beginning of the likeliest path.
    """
    n_nodes = len(tree) - 1
    most = min(budget.max_nodes, len(cost) - 2)
    is_chain = tree.depths[-1] == n_nodes
    if is_chain or budget.chain_only:  # path probabilities descend already
        path = range(1, n_nodes + 1) if is_chain else tree.likeliest_path()
        path = path[: min(most, budget.max_depth)]
        chain = list(accumulate([tree.probs[node] for node in path], mul))
        n = best_count(chain, cost, last_rows, switch_seconds, overhead_seconds, margin)
        return list(path[:n])
    probs = tree.path_probs()
    nodes: Sequence[int] = range(1, n_nodes + 1)
    if budget.max_depth < n_nodes:
        nodes = [node for node in nodes if tree.depths[node] <= budget.max_depth]
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
    if n > budget.max_leaves:
        while len(set(chosen) - {tree.parents[node] for node in chosen}) > budget.max_leaves:
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


def max_useful_rows(cost: Sequence[float], overhead_seconds: float = 0.0) -> int:
    """Rows beyond which more would gain 2% at most, even if all drafts were accepted.

    ``cost`` and ``overhead_seconds`` are as in ``select``.
    """
    rates = [rows / (seconds + overhead_seconds) for rows, seconds in enumerate(cost[1:], 1)]
    enough = 0.98 * max(rates)
    return next(rows for rows, rate in enumerate(rates, 1) if rate >= enough)
