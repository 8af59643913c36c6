"""What every method keeps to, besides plain decoding's text (``test_lossless``).

``SPECULATION_METHODS=FILE.py:SPEC`` adds one from outside.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter, MissingResource
from batching.target import Output, Sampler
from batching.together import Coroutine
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, PlainSteps, Requirements, Step
from speculation.drafting.resources import Resources
from speculation.methods import BUILT_IN, SAVED, parse_method
from speculation.methods import METHODS as TABLE
from speculation.verify import Match
from tests.support.fake_methods import METHODS, drafters_of, resources, run
from tests.support.fake_target import N_VOCAB, FakeOutput, fake_logits, plain_text
from tests.support.head_checks import draft

ALONE = [method for method in METHODS if method.split(":")[0] not in ("ar", "auto")]
BUDGETS = (
    DraftBudget(),
    DraftBudget(max_nodes=0),
    DraftBudget(max_nodes=3),
    DraftBudget(max_depth=2),
    DraftBudget(min_path_prob=0.3),
)
# They draft deeper at the end of a text, where such drafts cannot become text.
ANY_DEPTH = ("medusa", "eagle-1", "recycling", "jacobi", "lookahead")
# Those that select drafts by how likely they are, and those that learn it.
SELECTED = {spec.name for spec in BUILT_IN} - {"eagle-1", "jacobi", "lookahead"}
TAUGHT = {*SELECTED, "eagle-1", "forks"}
HEADS = {
    "medusa": "medusa",
    "redrafter": "redrafter",
    "eagle-1": "eagle",
    "eagle-2": "eagle",
    "eagle-3": "eagle-3",
    "mtp": "mtp",
    "dflash": "dflash",
}


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods loaded from files must not become sources of ``auto`` in other tests."""
    monkeypatch.setattr(TABLE, "_specs", dict(TABLE._specs))


def name_of(method: str) -> str:
    """Its name; of one from a file that of the file, without loading it."""
    return Path(method.split(":")[0]).stem


def test_every_method_takes_part() -> None:
    assert {name_of(method) for method in METHODS} >= {spec.name for spec in BUILT_IN}


class Watched(Drafter):
    """Gives a drafter another budget in each step, or leaves it out of the step, and checks what it
    does. With ``seed`` None it does neither."""

    def __init__(self, drafter: Drafter, seed: int | None, method: str) -> None:
        self._drafter, self._method = drafter, method
        self._random = None if seed is None else random.Random(seed)
        self._is_left_out = False
        self.drafted: list[tuple[int, int]] = []  # tokens of the text, and drafts

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        return self._drafter.requires

    def begin(self, prompt: Sequence[int]) -> Any:
        return self._drafter.begin(prompt)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        given = budget
        if self._random is not None:
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
        assert max(tree.depths) <= given.max_depth or self._method in ANY_DEPTH, given
        reached = [1.0]
        for parent, prob in zip(tree.parents[1:], tree.probs[1:], strict=True):
            reached.append(reached[parent] * prob)
        assert min(reached) >= given.min_path_prob - 1e-9 or self._method not in SELECTED, given
        self.drafted.append((len(tokens), len(tree) - 1))

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


@pytest.mark.parametrize("method", ALONE)
def test_a_method_keeps_to_its_budget_and_may_miss_steps(method: str) -> None:
    n_drafted, name = 0, name_of(method)
    for seed in range(20):
        drafters = [Watched(drafter, seed, name) for drafter in drafters_of(method, seed)]
        assert run("", seed, drafters=[*drafters])[0] == plain_text(seed), f"seed {seed}"
        n_drafted += sum(n for one in drafters for _, n in one.drafted)
    assert n_drafted > 10


class Verdict(Match):
    """The first draft at each level is right, or none is."""

    def __init__(self, *, accepts: bool) -> None:
        self._accepts = accepts

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        if not self._accepts:
            return [0], next(t for t in range(1, N_VOCAB) if not tree.children(0, t))
        path = [0]
        while path[-1] in tree.parents:
            path.append(tree.parents.index(path[-1]))
        if len(path) == 1:
            return path, sampler.sample(output, 0)
        return path[:-1], tree.tokens[path[-1]]


@pytest.mark.parametrize("method", [one for one in ALONE if name_of(one) in TAUGHT])
@pytest.mark.parametrize("accepts", [True, False])
def test_acceptance_follows_what_is_accepted(method: str, accepts: bool) -> None:
    shared = resources(method)
    drafters_of(method, 0, shared=shared)

    def log_odds() -> float:
        kept = shared.to_save({*SAVED, name_of(method)})
        return sum(sum(values) for name, values in kept.items() if name.endswith("acceptance"))

    before = log_odds()
    for seed in range(4):
        drafters = drafters_of(method, seed, shared=shared)
        run("", seed, drafters=drafters, verifier=Verdict(accepts=accepts))
    assert (log_odds() > before) is accepts
    assert log_odds() != before


@pytest.mark.parametrize("method", [f"{one}:p_min=0" if one == "mtp" else one for one in HEADS])
def test_a_head_drafts_from_the_state_of_the_last_step_and_of_no_other(method: str) -> None:
    (drafter,) = drafters_of(method, 0)

    def n_drafted(*text: int) -> int:
        draft(drafter, text, tree := TokenTree(text[-1]), DraftBudget())
        return len(tree) - 1

    def observe(text: tuple[int, ...], bonus: int) -> None:
        output = FakeOutput([text], [True], fake_logits, True)
        drafter.observe(Step(TokenTree(text[-1]), output, [0], bonus))

    drafter.begin([1, 2])
    assert n_drafted(1, 2) == 0  # no states of the prompt were read
    observe((1, 2), 5)
    assert n_drafted(1, 2, 5, 9) == 0  # the step in which 9 came was not observed
    observe((1, 2, 5, 9), 8)
    assert n_drafted(1, 2, 5, 9, 8) > 0
    assert n_drafted(1, 2, 5, 9, 8, 7) == 0


@pytest.mark.parametrize(
    "method",
    [
        "draft:p_min=0,p_path=0,draft_max=4",
        "eagle-1:choices=0.0.0/1.0/2,window=3",
        "eagle-2:depth=3,top_k=3,nodes=7,window=2",
        "eagle-3:depth=3,top_k=2,nodes=5",
        "mtp:p_min=0,depth=3",
        "dflash:top_k=2,nodes=5",
    ],
)
def test_a_full_context_of_its_own_ends_drafting_but_not_the_text(method: str) -> None:
    for seed in (22, 31):  # prompts of 5 tokens and of one
        shared = resources(method, n_ctx=30)
        watched = [Watched(one, None, method) for one in drafters_of(method, seed, shared=shared)]
        text = run("", seed, drafters=[*watched], n_tokens=80)[0]
        assert text == plain_text(seed, n_tokens=80)
        lengths = [n for n, n_drafted in watched[0].drafted if n_drafted]
        assert 10 < max(lengths) <= 30 < len(text)


@pytest.mark.parametrize("method", ["draft", *HEADS])
def test_a_method_asks_for_what_it_drafts_with(method: str) -> None:
    reason = f"method {method} needs {HEADS.get(method, '')} heads; load them with heads"
    if method == "draft":
        reason = "needs a draft model; load one with draft_model"
    if method == "mtp":
        reason = "needs a model with multi-token-prediction layers, or a file .* with heads"
    with pytest.raises(MissingResource, match=reason):
        parse_method(method).drafters(Resources())


def test_a_number_out_of_range_is_refused_by_its_name() -> None:
    n_refused = 0
    for spec in BUILT_IN:
        for field in fields(spec.params):
            if type(field.default) not in (int, float):
                continue
            low, high = field.metadata["within"]
            for value in (-1, 10**9) if field.name != "window" else (-1,):
                reason = rf"{field.name} is {value}(\.0)?; give {low} to {high}"
                with pytest.raises(InvalidParameter, match=reason):
                    parse_method(f"{spec.name}:{field.name}={value}")
                n_refused += 1
    assert n_refused > 30
