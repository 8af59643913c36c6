"""A method outside the package: drafts from the bigrams of the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, MethodSpec
from speculation.system.params import Params, param


@dataclass(frozen=True)
class BigramParams(Params):
    length: int = param(4, "draft tokens in a row", (1, 64))


class Bigrams(Drafter):
    def __init__(self, params: BigramParams) -> None:
        self._params = params
        self._next: dict[int, int] = {}
        self._n_seen = 0  # tokens of the text already in the table

    def begin(self, prompt: Sequence[int]) -> None:
        self._next, self._n_seen = {}, 0

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._next.update(pairwise(tokens[max(0, self._n_seen - 1) :]))
        self._n_seen = len(tokens)
        node = 0
        for _ in range(min(self._params.length, budget.room(tree), budget.max_depth)):
            if (following := self._next.get(tree.tokens[node])) is None:
                return
            node = tree.add(node, following)


spec = MethodSpec("bigrams", "Bigrams of the text", lambda p, r: Bigrams(p), BigramParams)
