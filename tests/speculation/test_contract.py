"""What every method keeps to, besides plain decoding's text (``test_lossless``)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from batching.errors import InvalidParameter
from batching.together import Coroutine
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, PlainSteps, Requirements, Step
from speculation.methods import BUILT_IN, parse_method
from tests.speculation import test_lossless
from tests.speculation.test_lossless import METHODS, drafters_of
from tests.support.fake_target import plain_text

BUDGETS = (
    DraftBudget(),
    DraftBudget(max_nodes=0),
    DraftBudget(max_nodes=3),
    DraftBudget(max_depth=2),
    DraftBudget(min_path_prob=0.3),
)
# They draft deeper at the end of a text, where such drafts cannot become text.
ANY_DEPTH = ("medusa", "eagle-1", "recycling", "jacobi", "lookahead")


class Watched(Drafter):
    """Gives a drafter another budget in each step, or leaves it out of the step, and checks what it
    does."""

    def __init__(self, drafter: Drafter, seed: int, *, any_depth: bool) -> None:
        self._drafter, self._random, self._any_depth = drafter, random.Random(seed), any_depth
        self._is_left_out = False
        self.n_drafted = 0

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        return self._drafter.requires

    def begin(self, prompt: Sequence[int]) -> Any:
        return self._drafter.begin(prompt)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        self._is_left_out = self._random.random() < 0.2
        if self._is_left_out:
            return
        given = self._random.choice(BUDGETS)._replace(n_vocab=budget.n_vocab)
        given = given._replace(
            max_nodes=min(given.max_nodes, budget.max_nodes),
            max_depth=min(given.max_depth, budget.max_depth),
        )
        yield from self._drafter.draft(tokens, tree, given) or ()
        assert len(tree) - 1 <= given.max_nodes, given
        assert max(tree.depths) <= given.max_depth or self._any_depth, given
        self.n_drafted += len(tree) - 1

    def observe(self, step: Step) -> None:
        if self._is_left_out:
            self._drafter.observe_plain(PlainSteps(step.tokens, [0.01]))
        else:
            self._drafter.observe(step)

    def observe_plain(self, steps: PlainSteps) -> None:
        self._drafter.observe_plain(steps)

    def promise(self, tokens: Sequence[int]) -> Any:
        promised = self._drafter.promise(tokens)
        assert promised is None or 0.0 <= promised <= 1.0
        return promised

    def end(self, tokens: Sequence[int]) -> None:
        self._drafter.end(tokens)


@pytest.mark.parametrize("method", [name for name in METHODS if name.split(":")[0] != "auto"][1:])
def test_a_method_keeps_to_its_budget_and_may_miss_steps(method: str) -> None:
    n_drafted = 0
    for seed in range(20):
        drafters = [
            Watched(drafter, seed, any_depth=method.split(":")[0] in ANY_DEPTH)
            for drafter in drafters_of(method, seed)
        ]
        text, _, _ = test_lossless.run("", seed, drafters=[*drafters])
        assert text == plain_text(seed), f"seed {seed}"
        n_drafted += sum(one.n_drafted for one in drafters)
    assert n_drafted > 10


def test_a_number_out_of_range_is_refused_by_its_name() -> None:
    n_refused = 0
    for spec in BUILT_IN:
        for field in fields(spec.params):
            if type(field.default) not in (int, float):
                continue
            for value in (-1, 10**9) if field.name != "window" else (-1,):
                with pytest.raises(InvalidParameter, match=f"{field.name} is {value}"):
                    parse_method(f"{spec.name}:{field.name}={value}")
                n_refused += 1
    assert n_refused > 30
