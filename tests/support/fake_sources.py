"""A fake source of auto, a fake clock for it, and steps without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from batching.together import run
from batching.tree import TokenTree
from speculation.auto.choose import choose
from speculation.auto.drafter import Auto
from speculation.drafter import DraftBudget, Drafter, Step


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr("batching.clock._clock", clock)


class OneToken(Drafter):
    """Drafts one token with a given probability; nothing if that is 0."""

    budget = DraftBudget(min_path_prob=0.01)

    def __init__(self, token: int, prob: float) -> None:
        self.token, self.prob = token, prob
        self.n_asked = 0
        self.use(Clock(), 0.0)

    def use(self, clock: Clock, seconds: float, reading: float = 0.0) -> None:
        """Take ``seconds`` of ``clock`` for a draft, and ``reading`` for a token it has to read."""
        self._clock, self._seconds, self._reading = clock, seconds, reading

    def begin(self, prompt: Sequence[int]) -> None:
        self._n_read = 0

    def n_unread(self, tokens: Sequence[int]) -> int:
        return len(tokens) - 1 - self._n_read if self._reading else 0

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self.n_asked += 1
        self._clock.now += self._seconds + self._reading * self.n_unread(tokens)
        self._n_read = len(tokens)
        if self.prob:
            tree.add(0, self.token, prob=self.prob)


def draft(auto: Auto, tokens: Sequence[int]) -> TokenTree:
    """The drafts that are decoded after ``tokens``."""
    text: Any = MagicMock(chooser=auto, tokens=tokens, tree=TokenTree(tokens[-1]))
    text.meter.draft_seconds = 0.0
    run(auto.draft(tokens, text.tree, OneToken.budget))
    text.keep = lambda nodes: auto.keep(text.tree, nodes)
    choose([text], {}, auto.budget.prices)
    tree: TokenTree = text.tree
    return tree


def take_step(auto: Auto, tokens: Sequence[int], clock: Clock, *, right: bool = False) -> list[int]:
    """Let auto draft and observe a step of one second; accept its first draft if ``right``.

    Returns the tokens that the step added.
    """
    start = clock.now
    tree = draft(auto, tokens)
    path = [0, 1] if right and len(tree) > 1 else [0]
    step = Step(tree, None, path, 9, 1.0, clock.now - start)  # type: ignore[arg-type]
    clock.now += 1.0
    auto.cost.follow(len(tree), len(tokens) - 1, 1.0)
    auto.observe(step)
    return step.tokens
