"""Selects the draft nodes with the most expected tokens per second. Pure.

A node is accepted with its path probability, the product of the estimates from the root down. So a
step that decodes the nodes S is expected to yield 1 + the sum of their path probabilities, at cost
c(1 + |S|). Path probabilities never rise along a path, so the n most probable nodes form a tree,
and no set of n nodes yields more. Comparing all n is therefore as good as exhaustive search. Plain
decoding is n = 0.
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
    """The nodes worth decoding, without the root, ascending, within ``budget``.

    cost              seconds for a batch of 0, 1, 2, … rows; its length limits the rows
    last_rows         rows of the last step; a different number costs ``switch_seconds`` more.
                      0 = none, so every number does
    overhead_seconds  cost of a step regardless of its rows
    margin            relative gain in tokens per second that drafts must have over plain decoding

    If the result has more than ``budget.max_leaves`` leaves, the least probable nodes are dropped.
    With ``budget.chain_only``, returns a prefix of the likeliest path.
    """
    n_nodes = len(tree) - 1
    max_nodes = min(budget.max_nodes, len(cost) - 2)
    is_chain = tree.depths[-1] == n_nodes
    if is_chain or budget.chain_only:  # in order of path probability already
        path = range(1, n_nodes + 1) if is_chain else tree.likeliest_path()
        path = path[: min(max_nodes, budget.max_depth)]
        chain = list(accumulate([tree.probs[node] for node in path], mul))
        n = best_count(chain, cost, last_rows, switch_seconds, overhead_seconds, margin)
        return list(path[:n])
    probs = tree.path_probs()
    nodes: Sequence[int] = range(1, n_nodes + 1)
    if budget.max_depth < n_nodes:
        nodes = [node for node in nodes if tree.depths[node] <= budget.max_depth]
    order = sorted(nodes, key=probs.__getitem__, reverse=True)  # parents first
    n = best_count(
        [probs[node] for node in order[:max_nodes]],
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
    """How many nodes to decode, given their path probabilities in descending order.

    >>> best_count([0.9, 0.5, 0.1], cost=[0.0, 1.0, 1.2, 1.4, 1.6])
    2
    """
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
    """The batch size beyond which more rows gain at most 2%, even if all drafts are accepted.

    ``cost`` and ``overhead_seconds`` are as in ``select``.
    """
    rates = [rows / (seconds + overhead_seconds) for rows, seconds in enumerate(cost[1:], 1)]
    enough = 0.98 * max(rates)
    return next(rows for rows, rate in enumerate(rates, 1) if rate >= enough)
