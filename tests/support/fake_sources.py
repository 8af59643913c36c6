"""Fake sources of auto, a fake clock for them, and steps without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from batching.tree import TokenTree
from speculation.auto.drafter import Auto
from speculation.drafter import DraftBudget, Drafter, Step


class Never(Drafter):
    """Drafts nothing."""

    def __init__(self) -> None:
        self.began = 0

    def begin(self, prompt: object) -> None:
        self.began += 1

    def draft(self, tokens: object, tree: object, budget: object) -> None:
        pass

    def observe(self, step: object) -> None:
        pass


class OneToken(Drafter):
    """Drafts one token with a given probability."""

    def __init__(self, token: int, prob: float) -> None:
        self.token, self.prob = token, prob
        self.asked = 0

    def begin(self, prompt: object) -> None:
        pass

    def draft(self, tokens: object, tree: TokenTree, budget: DraftBudget) -> None:
        self.asked += 1
        if self.prob:
            tree.add(0, self.token, prob=self.prob)

    def observe(self, step: object) -> None:
        pass


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    for module in ("drafter", "source"):
        monkeypatch.setattr(f"speculation.auto.{module}.perf_counter", clock)


def take_step(auto: Auto, path: Sequence[int] = (0,)) -> int:
    """Let auto draft and observe a step of one second. Returns how many rows it had."""
    tree = TokenTree(1)
    auto.draft([1], tree, DraftBudget())
    auto.observe(Step(tree, None, list(path), 9, 1.0))  # type: ignore[arg-type]
    return len(tree)
