"""Selects the draft nodes of one or more trees with the most expected tokens per second. Pure.

A node is accepted with its path probability, the product of the estimates from the root down. So a
step that decodes the nodes S of t trees is expected to yield t + the sum of their path
probabilities, at cost c(t + |S|). Path probabilities never rise along a path, so the n most
probable nodes form trees, and no set of n nodes yields more. Comparing all n is therefore as good
as exhaustive search. Plain decoding is n = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from batching.tree import TokenTree, keep_leaves
from speculation.drafter import DraftBudget


def select(
    trees: Sequence[TokenTree],
    budgets: Sequence[DraftBudget],
    cost: Sequence[float],
    *,
    other_texts: int = 0,
    other_rows: int = 0,
    last_rows: int = 0,
    change_seconds: float = 0.0,
    overhead_seconds: float = 0.0,
) -> list[list[int]]:
    """The nodes worth decoding of each tree, without its root, ascending, within its budget.

    cost              seconds for a batch of 0, 1, 2, … rows; its length limits the rows
    other_texts       texts in the batch that have no tree here; each is expected to yield a token
    other_rows        rows of the batch besides those of the trees
    last_rows         rows of the last step; 0 = none
    change_seconds    what a step with drafts costs more if it has another number of rows
    overhead_seconds  cost of a step regardless of its rows

    If a result has more leaves than its budget allows, its least probable nodes are dropped. With
    ``budget.chain_only``, a result is a prefix of the tree's likeliest path.
    """
    n_texts, n_rows = len(trees) + other_texts, len(trees) + other_rows
    ranked = [_ranked(tree, budget) for tree, budget in zip(trees, budgets, strict=True)]
    if len(trees) == 1:
        ((order, probs),) = ranked
        n = best_count(probs, cost, n_texts, n_rows, last_rows, change_seconds, overhead_seconds)
        chosen = [order[:n]]
    else:
        merged = [
            (-prob, t, i) for t, (_, probs) in enumerate(ranked) for i, prob in enumerate(probs)
        ]
        merged.sort()  # among equals, a tree's nodes keep their order
        probs = [-negative for negative, _, _ in merged]
        n = best_count(probs, cost, n_texts, n_rows, last_rows, change_seconds, overhead_seconds)
        counts = [0] * len(trees)
        for _, t, _ in merged[:n]:
            counts[t] += 1
        chosen = [order[:count] for (order, _), count in zip(ranked, counts, strict=True)]
    for tree, budget, nodes in zip(trees, budgets, chosen, strict=True):
        keep_leaves(tree, nodes, budget.max_leaves)
        nodes.sort()
    return chosen


def _ranked(tree: TokenTree, budget: DraftBudget) -> tuple[list[int], list[float]]:
    """A tree's nodes within ``budget`` by falling path probability, and these; parents first."""
    n_nodes = len(tree) - 1
    is_chain = tree.depths[-1] == n_nodes
    if is_chain or budget.chain_only:  # in order of path probability already
        path = list(range(1, n_nodes + 1)) if is_chain else tree.likeliest_path()
        path = path[: min(budget.max_nodes, budget.max_depth)]
        return path, list(accumulate([tree.probs[node] for node in path], mul))
    probs = tree.path_probs()
    nodes: Sequence[int] = range(1, n_nodes + 1)
    if budget.max_depth < n_nodes:
        nodes = [node for node in nodes if tree.depths[node] <= budget.max_depth]
    order = sorted(nodes, key=probs.__getitem__, reverse=True)[: budget.max_nodes]
    return order, [probs[node] for node in order]


def best_count(
    probs: Sequence[float],
    cost: Sequence[float],
    n_texts: int = 1,
    n_rows: int = 1,
    last_rows: int = 0,
    change_seconds: float = 0.0,
    overhead_seconds: float = 0.0,
) -> int:
    """How many nodes to decode, given their path probabilities in descending order.

    Without any, the batch has ``n_rows`` and yields ``n_texts`` tokens.

    >>> best_count([0.9, 0.5, 0.1], cost=[0.0, 1.0, 1.2, 1.4, 1.6])
    2
    """
    expected, best, best_rate = float(n_texts), 0, 0.0
    for n in range(min(len(probs), len(cost) - 1 - n_rows) + 1):
        if n:
            expected += probs[n - 1]
        rows = n_rows + n
        change = change_seconds if n and rows != last_rows else 0.0
        seconds = cost[rows] + overhead_seconds + change
        rate = expected / seconds
        if rate > best_rate:
            best_rate, best = rate, n
    return best
