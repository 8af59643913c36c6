"""Token recycling: what is kept of a row, and the tree that grows from it."""

from __future__ import annotations

import numpy as np
import pytest

from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget
from speculation.drafting.acceptance import Acceptance, by_probability
from speculation.methods.recycling import Recycling, RecyclingParams, likeliest

TABLE = {1: [(2, 0.95), (3, 0.05)], 2: [(4, 0.75), (5, 0.25)], 4: [(1, 0.95)], 3: [(9, 0.95)]}
EXACT = Acceptance(by_probability(0.0, 1.0))  # a draft is worth the probability it was given


def grown(**params: int) -> list[tuple[int, int]]:
    """(parent, token) of the drafts below token 1."""
    tree = TokenTree(1)
    drafter = Recycling(RecyclingParams(**params), TABLE, EXACT)
    drafter.draft([1], tree, DraftBudget())
    return list(zip(tree.parents[1:], tree.tokens[1:], strict=True))


def test_a_row_leaves_its_likeliest_tokens_and_their_shares() -> None:
    logits: Floats = np.full(20, -5.0, np.float32)
    logits[[3, 7, 11]] = [2.0, 3.0, 1.0]
    assert [token for token, _ in likeliest(logits)[:3]] == [7, 3, 11]
    assert sum(prob for _, prob in likeliest(logits)) == pytest.approx(1.0)
    assert len(likeliest(np.zeros(20, np.float32))) == 8


def test_the_likeliest_path_is_added_first_and_siblings_when_their_turn_comes() -> None:
    # 2: 0.95, 4 below it: 0.71, 1: 0.68, 2 again: 0.64, 4 again: 0.48, …
    assert grown(nodes=5, depth=9) == [(0, 2), (1, 4), (2, 1), (3, 2), (4, 4)]
    # With two levels: 2, 4, then 5 below 2 with 0.24, and 3 with 0.05.
    assert grown(nodes=5, depth=2) == [(0, 2), (1, 4), (1, 5), (0, 3), (4, 9)]
