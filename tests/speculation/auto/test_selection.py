"""Selecting the nodes of a draft tree that pay for their rows."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from batching.tree import TokenTree
from speculation.auto.selection import select as select_of_trees
from speculation.drafter import DraftBudget


def select(tree: TokenTree, budget: DraftBudget, cost: list[float], **settings: Any) -> list[int]:
    (chosen,) = select_of_trees([tree], [budget], cost, **settings)
    return chosen


FLAT = [0.0] + [1.0] * 64
LINEAR = [float(n) for n in range(65)]


def random_tree(rng: random.Random, n: int) -> TokenTree:
    tree = TokenTree(0)
    for token in range(1, n + 1):
        tree.add(rng.randrange(len(tree)), token, prob=rng.random())
    return tree


def expected_rate(tree: TokenTree, nodes: tuple[int, ...], cost: list[float]) -> float:
    probs = tree.path_probs()
    return (1.0 + sum(probs[node] for node in nodes)) / cost[len(nodes) + 1]


@pytest.mark.parametrize("seed", range(40))
def test_selection_finds_the_same_tree_as_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 8)
    cost = [0.0, 1.0]
    for _ in range(8):
        cost.append(cost[-1] + rng.choice((0.0, 0.05, 0.3, 1.0)) * rng.random())
    nodes = range(1, len(tree))
    rooted = [
        some
        for n in range(len(tree))
        for some in combinations(nodes, n)
        if all(tree.parents[node] in (0, *some) for node in some)
    ]
    best = max(expected_rate(tree, some, cost) for some in rooted)
    chosen = select(tree, DraftBudget(), cost)
    assert all(tree.parents[node] in (0, *chosen) for node in chosen)
    assert expected_rate(tree, tuple(chosen), cost) == pytest.approx(best, abs=1e-12)


def test_free_rows_fill_the_batch() -> None:
    tree = random_tree(random.Random(1), 63)
    assert select(tree, DraftBudget(), FLAT) == list(range(1, 64))
    assert len(select(tree, DraftBudget(max_nodes=10), FLAT)) == 10


def test_no_node_is_selected_beyond_the_end_of_the_text() -> None:
    wide, chain = random_tree(random.Random(1), 63), TokenTree(0)
    chain.add_chain(0, range(1, 20))
    short = DraftBudget(max_depth=2)
    assert select(wide, short, FLAT) == [n for n in range(1, 64) if wide.depths[n] <= 2]
    assert select(chain, short, FLAT) == [1, 2]


def test_rows_as_expensive_as_a_step_are_spent_only_on_certain_drafts() -> None:
    tree = TokenTree(0)
    node = tree.add(0, 1, prob=1.0)
    node = tree.add(node, 2, prob=1.0)
    tree.add(node, 3, prob=0.9)
    tree.add(0, 4, prob=0.5)
    assert select(tree, DraftBudget(), LINEAR) == []
    nearly = [0.0] + [1.0 + 0.95 * n for n in range(64)]
    assert select(tree, DraftBudget(), nearly) == [1, 2]


def test_a_chain_budget_keeps_the_likeliest_path_or_the_first_of_sampled_drafts() -> None:
    tree = TokenTree(1)
    first = tree.add(0, 2, prob=0.3)
    second = tree.add(0, 3, prob=0.5)
    tree.add(first, 4, prob=0.9)
    below = tree.add(second, 5, prob=0.9)
    tree.add(second, 6, prob=0.1)
    assert tree.likeliest_path() == [second, below]  # 0.5 + 0.45 against 0.3 + 0.27
    assert select(tree, DraftBudget(chain_only=True), [0.0, *[1.0] * 10]) == [second, below]
    # Choosing sampled drafts by their probability would bias the sample.
    tree.draft_probs = {node: np.full(8, 0.125, np.float32) for node in range(1, 6)}
    assert tree.likeliest_path() == [first, first + 2]


def test_branches_beyond_the_number_of_sequences_are_left_out() -> None:
    tree = TokenTree(0)
    for token in range(1, 9):
        tree.add(0, token, prob=0.125 - token / 1000)
    assert select(tree, DraftBudget(max_leaves=3), FLAT) == [1, 2, 3]


def test_a_change_of_batch_size_must_pay_for_itself() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, prob=0.6)
    cost = [0.0, 1.0, 1.5]
    assert select(tree, DraftBudget(), cost) == [1]
    assert select(tree, DraftBudget(), cost, last_rows=1, extra_seconds=(0.0, 0.2)) == []
    assert select(tree, DraftBudget(), cost, last_rows=2, extra_seconds=(0.0, 0.2)) == [1]


def test_a_fixed_overhead_per_step_makes_longer_drafts_worthwhile() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, prob=0.4)
    cost = [0.0, 1.0, 1.5]
    assert select(tree, DraftBudget(), cost) == []
    assert select(tree, DraftBudget(), cost, overhead_seconds=1.0) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_among_several_trees_the_likeliest_nodes_of_all_are_chosen(seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, 4) for _ in range(3)]
    cost = [0.0, 1.0]
    for _ in range(15):
        cost.append(cost[-1] + rng.choice((0.0, 0.05, 0.3)) * rng.random())
    chosen = select_of_trees(trees, [DraftBudget()] * 3, cost)
    for tree, nodes in zip(trees, chosen, strict=True):
        assert all(tree.parents[node] in (0, *nodes) for node in nodes)
    probs = sorted((prob for tree in trees for prob in tree.path_probs()[1:]), reverse=True)
    rates = [(3 + sum(probs[:n])) / cost[3 + n] for n in range(len(probs) + 1)]
    n = sum(map(len, chosen))
    kept = sum(
        tree.path_probs()[node] for tree, nodes in zip(trees, chosen, strict=True) for node in nodes
    )
    assert (3 + kept) / cost[3 + n] == pytest.approx(max(rates), abs=1e-12)
