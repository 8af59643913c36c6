"""Selects the draft nodes of one or more trees with the most expected tokens per second. Pure.

A node is accepted with its path probability, the product of the estimates from the root down. So a
step that decodes the nodes S of t trees is expected to yield t + the sum of their path
probabilities, at cost c(t + |S|). Path probabilities never rise along a path, so the n most
probable nodes form trees, and no set of n nodes yields more. Comparing all n is therefore as good
as exhaustive search. Plain decoding is n = 0.
"""

from __future__ import annotations

from collections import Counter
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
    n_texts: int = 1,
    plain_rows: int = 1,
    last_rows: int = 0,
    change_seconds: float = 0.0,
    overhead_seconds: float = 0.0,
) -> list[list[int]]:
    """The nodes worth decoding of each tree, without its root, ascending, within its budget.

    cost              seconds for a batch of 0, 1, 2, … rows; its length limits the rows
    n_texts           texts in the batch; each is expected to yield a token
    plain_rows        rows of the batch without these nodes
    last_rows         rows of the last step; 0 = none
    change_seconds    what a step with drafts costs more if it has another number of rows
    overhead_seconds  cost of a step regardless of its rows

    If a result has more leaves than its budget allows, its least probable nodes are dropped. With
    ``budget.chain_only``, a result is a prefix of the tree's likeliest path.
    """
    ranked = [_ranked(tree, budget) for tree, budget in zip(trees, budgets, strict=True)]
    merged = [(-prob, t, i) for t, (_, probs) in enumerate(ranked) for i, prob in enumerate(probs)]
    merged.sort()  # among equals, a tree's nodes keep their order
    expected, best, best_rate = float(n_texts), 0, 0.0
    for rows in range(plain_rows, min(plain_rows + len(merged) + 1, len(cost))):
        seconds = cost[rows] + overhead_seconds
        if rows > plain_rows:
            expected -= merged[rows - plain_rows - 1][0]
            seconds += change_seconds if rows != last_rows else 0.0
        rate = expected / seconds
        if rate > best_rate:
            best_rate, best = rate, rows - plain_rows
    counts = Counter(t for _, t, _ in merged[:best])
    chosen = [order[: counts[t]] for t, (order, _) in enumerate(ranked)]
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
