"""Every method gives plain decoding's text: greedy and seeded, on a fake target that checks its KV.

Random trees are among the methods: if every tree is lossless, so is that of every method.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from batching.cache import SequenceCache
from batching.rows import Rows
from batching.slots import Slot, Slots
from batching.tree import NO_LIMIT, Floats, TokenTree
from speculation.drafter import DraftBudget, Drafter, Requirements, Step
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.meter import Stats
from speculation.methods import METHODS as TABLE
from speculation.methods import load_method_file, parse_method
from speculation.sequence import TokenSequence
from speculation.step import Batch, step
from tests.support.fake_target import (
    N_VOCAB,
    FakeEagleHead,
    FakeHeads,
    FakeSampler,
    FakeTarget,
    fake_logits,
    plain_text,
    prompt_of,
)
from tests.support.paths import ROOT
from tests.support.written import WrittenText, write


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods loaded from files must not become sources of ``auto`` in other tests."""
    monkeypatch.setattr(TABLE, "_specs", dict(TABLE._specs))


class RandomTrees(Drafter):
    """Grows any tree: random shape, merged or not, often along the likely continuation."""

    requires = Requirements(branches=30)

    def __init__(self, seed: int, *, orders_branches: bool = True) -> None:
        self._random = random.Random(seed)
        self._orders_branches = orders_branches

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        rng = self._random
        texts: dict[int, tuple[int, ...]] = {0: tuple(tokens)}
        parent = 0
        for _ in range(min(rng.randrange(16), budget.room(tree))):
            parent = rng.choice([parent, rng.choice(list(texts))])
            if rng.random() < 0.7:
                token = int(fake_logits(texts[parent]).argmax())
            else:
                token = rng.randrange(N_VOCAB)
            before = len(tree)
            node = tree.add(parent, token, merge=rng.random() < 0.7)
            if len(tree) > before:
                texts[node] = (*texts[parent], token)
            parent = node
        if self._orders_branches and rng.random() < 0.3:
            tree.branches = rng.sample(range(len(tree)), k=min(2, len(tree)))

    def observe(self, step: Step) -> None:
        assert step.path[0] == 0
        assert all(step.tree.parents[b] == a for a, b in pairwise(step.path))


METHODS = (
    "ar",
    "auto",
    "auto:sources=draft",
    "auto:sources=suffix",
    "recycling",
    "recycling:nodes=7,depth=2",
    "draft",
    "draft:p_min=0,p_path=0,draft_max=4",
    "draft:width=3,nodes=9,p_min=0.05,draft_max=3",
    "draft:width=4,nodes=5,p_min=0,draft_max=5",
    "medusa",
    "medusa:nodes=40",
    "auto:sources=medusa",
    "auto:sources=medusa+suffix",
    "eagle-1",
    "eagle-1:choices=0.0.0/1.0/2,window=3",
    "eagle-2",
    "eagle-2:depth=3,top_k=3,nodes=7,window=2",
    "eagle-2:top_k=1,nodes=4,window=0",
    "auto:sources=eagle",
    "auto:sources=eagle+medusa+suffix",
    "prompt-lookup",
    "prompt-lookup:max_ngram=2,draft=7",
    "prediction",
    "prediction:p_min=0.02,draft_max=5",
    "auto:sources=prediction+suffix",
    "suffix",
    "suffix:memory=off,p_min=0.1,branches=4",
    "suffix:p_min=0.02,branches=6,draft_max=5",
    f"{ROOT / 'examples' / 'bigrams.py'}:spec",
    f"{ROOT / 'examples' / 'forks.py'}:spec",
    "jacobi:guesses=5",
    "lookahead:window=5,ngram=4,guesses=2",
    "lookahead:window=4,ngram=5,guesses=6",
    "lookahead:window=1,ngram=3,guesses=1",
)


def resources(n_rewind: int = NO_LIMIT, draft_rewind: int = NO_LIMIT) -> Resources:
    """Nearly free rows, so that auto tries everything, and a draft model whose drafts are mostly
    accepted."""
    curve = CostCurve.linear(1.0, 0.003)
    return Resources(
        lambda: Cost(curve),
        n_rewind=n_rewind,
        draft=FakeTarget(logits=draft_logits, n_rewind=draft_rewind),
        heads={"medusa": FakeHeads(), "eagle": FakeEagleHead(draft_logits)},
    )


@cache
def draft_logits(prefix: tuple[int, ...]) -> Floats:
    return fake_logits(prefix) + 0.5 * fake_logits((*prefix, 0))


def drafters_of(method: str, seed: int, n_rewind: int = NO_LIMIT) -> list[Drafter]:
    if method == "random-trees":
        return [RandomTrees(seed)]
    if method.endswith(" by a recurrent model"):
        return parse_method(method.split()[0]).drafters(resources(n_rewind, draft_rewind=0))
    if method == "unnamed-trees":
        return [RandomTrees(seed, orders_branches=False)]
    if method == "all-in-one-tree":
        return [
            RandomTrees(seed),
            *parse_method("suffix:branches=3,p_min=0.1").drafters(),
            *parse_method("jacobi:guesses=3").drafters(),
        ]
    shared = resources(n_rewind)
    if "prediction" in method:
        shared = shared.for_text(prediction=edited(plain_text(seed), seed))
    return parse_method(load_method_file(method)).drafters(shared)


def edited(text: list[int], seed: int) -> tuple[int, ...]:
    """``text`` with some tokens left out, and others in between."""
    rng = random.Random(seed)
    kept = [token for token in text if rng.random() < 0.9]
    return tuple(t for token in kept for t in ((token, token // 2) if token == 3 else (token,)))


def run(
    method: str,
    seed: int,
    temperature: float = 0.0,
    penalty: float = 0.0,
    n_ctx: int = 400,
    n_tokens: int = 32,
    n_rewind: int = NO_LIMIT,
    drafters: list[Drafter] | None = None,
) -> tuple[list[int], Stats, SequenceCache]:
    """The text of ``method``, or with ``drafters``, for the prompt and sampler that ``seed`` stands
    for."""
    prompt = prompt_of(seed)
    drafters = drafters_of(method, seed, n_rewind) if drafters is None else drafters
    target = FakeTarget(n_ctx=n_ctx, n_rewind=n_rewind)
    slots = Slots(target, 1)
    sampler = FakeSampler(temperature, seed, penalty)
    text = WrittenText(prompt, slots.slots[0], drafters, sampler=sampler, n_tokens=n_tokens)
    steps, cache, found = list(write(text, slots)), text.cache, text.reply.token_ids
    assert [token for step in steps for token in step.tokens] == found
    assert [step.finish_reason is not None for step in steps] == [False] * (len(steps) - 1) + [True]
    # Whatever was drafted, each sequence now holds exactly the text without its last token.
    assert cache.tokens == (prompt + found)[: cache.n_past]
    assert cache.n_past == len(prompt) + len(found) - 1
    assert all(target.tokens_of(s) == cache.tokens for s in range(cache.n_seq))
    if not (text.needed.hidden or text.needed.layers or n_rewind < NO_LIMIT):
        assert len(target.decoded) == text.reply.stats.n_steps
        assert len(target.decoded[0]) >= len(prompt)
    return found, text.reply.stats, cache


@pytest.mark.parametrize("method", [*METHODS, "random-trees", "all-in-one-tree"])
@pytest.mark.parametrize(
    ("n_seeds", "settings"),
    [(50, {}), (50, {"temperature": 0.8, "penalty": 1.0}), (30, {"n_ctx": 40, "n_tokens": 100})],
    ids=["greedy", "seeded with penalties", "nearly full context"],
)
def test_text_equals_plain_decoding(method: str, n_seeds: int, settings: dict[str, Any]) -> None:
    for seed in range(n_seeds):
        assert run(method, seed, **settings)[0] == plain_text(seed, **settings), f"seed {seed}"


CHAINS = [method for method in METHODS if not method.startswith("lookahead")]


@pytest.mark.parametrize("method", [*CHAINS, "unnamed-trees"])
@pytest.mark.parametrize("n_rewind", [1, 5])
def test_text_of_a_target_with_limited_rewind_equals_plain_decoding(
    method: str, n_rewind: int
) -> None:
    full: dict[str, Any] = {"temperature": 0.8, "n_ctx": 40, "n_tokens": 100}
    for seed in range(10):
        for settings in ({}, full):
            ours = run(method, seed, n_rewind=n_rewind, **settings)[0]
            assert ours == plain_text(seed, **settings), f"seed {seed}"


@pytest.mark.parametrize("n_rewind", [1, 5])
def test_texts_in_one_batch_of_a_recurrent_target_equal_plain_decoding(n_rewind: int) -> None:
    methods = ("unnamed-trees", "auto", "prompt-lookup", "suffix:p_min=0.1", "jacobi:guesses=5")
    n_accepted = n_cancelled = 0
    for first in range(0, 80, 8):
        rng = random.Random(first)
        shared = Slots(FakeTarget(n_rewind=n_rewind, n_seq_max=3), 3)
        batch = Batch(shared, Cost(CostCurve.linear(1.0, 0.003)))
        caches = {slot: SequenceCache(slot) for slot in shared.slots}
        waiting = list(range(first, first + 8))
        running: dict[Slot, tuple[int, WrittenText]] = {}
        while waiting or running:
            for slot, own in caches.items():
                if waiting and slot not in running and rng.random() < 0.3:
                    seed = waiting.pop()
                    drafters = drafters_of(rng.choice(methods), seed, n_rewind)
                    sampler = FakeSampler(0.8, seed)
                    text = WrittenText(
                        prompt_of(seed), slot, drafters, sampler=sampler, n_tokens=32, cache=own
                    )
                    running[slot] = seed, text
            texts = [text for _, text in running.values()]
            pieces: dict[TokenSequence, Rows] = {
                text: rows
                for text in texts
                if text.reading is not None
                and (rows := text.next_piece(rng.randrange(2, 20))) is not None
            }
            step([text for text in texts if text.reading is None], batch, pieces)
            for slot, (seed, text) in list(running.items()):
                is_cancelled = text.reading is None and not text.has_ended and rng.random() < 0.01
                if is_cancelled:
                    text.end("cancelled")
                    n_cancelled += 1
                if text.has_ended:
                    assert text.reply.error is None
                    del running[slot]
                    expected = plain_text(seed, temperature=0.8)
                    n = len(text.reply.token_ids) if is_cancelled else None
                    assert text.reply.token_ids == expected[:n]
                    n_accepted += text.reply.stats.n_accepted
    assert n_accepted > 50 and n_cancelled > 3


@pytest.mark.parametrize("method", ["draft:p_min=0,p_path=0,draft_max=4", "auto:sources=draft"])
@pytest.mark.parametrize("n_rewind", [3, NO_LIMIT])
def test_a_draft_model_that_cannot_rewind_drafts_the_same_tokens(
    method: str, n_rewind: int
) -> None:
    for seed in range(20):
        text, stats, _ = run(f"{method} by a recurrent model", seed, n_rewind=n_rewind)
        assert text == plain_text(seed), f"seed {seed}"
        other = run(method, seed, n_rewind=n_rewind)[1]
        if method.startswith("draft"):  # auto depends on the clock
            assert (stats.n_steps, stats.n_accepted) == (other.n_steps, other.n_accepted)


def test_text_drafted_from_earlier_texts_equals_plain_decoding() -> None:
    shared = resources()
    suffix = parse_method("suffix:branches=6,p_min=0.02")
    n_steps = {"cold": 0, "warm": 0}
    for pass_ in n_steps:
        for seed in range(20):
            text, stats, _ = run("", seed, drafters=suffix.drafters(shared))
            assert text == plain_text(seed), f"seed {seed}"
            n_steps[pass_] += stats.n_steps
    assert n_steps["warm"] < 0.5 * n_steps["cold"]


PREDICTED = ("prediction", "auto:sources=prediction+suffix")
WITH_HEADS = ("medusa", "auto:sources=medusa", "eagle-1", "eagle-2", "auto:sources=eagle")


@pytest.mark.parametrize(
    ("methods", "n_rewind", "gain"),
    [
        (("random-trees", *PREDICTED, *WITH_HEADS), NO_LIMIT, 1.8),
        (("auto", "draft", "medusa", "eagle-2"), 4, 1.2),
    ],
    ids=["any", "limited rewind"],
)
def test_drafts_are_often_accepted(methods: tuple[str, ...], n_rewind: int, gain: float) -> None:
    """Otherwise the tests above would show nothing about accepted paths."""
    for method in methods:
        steps = [run(method, seed, n_rewind=n_rewind)[1] for seed in range(50)]
        assert sum(s.n_tokens for s in steps) > gain * sum(s.n_steps for s in steps), method


def test_counts_add_up_and_nothing_is_committed_beyond_the_end_of_a_text() -> None:
    for seed in range(40):
        text, stats, cache = run("random-trees", seed, n_tokens=7)
        assert stats.n_tokens == len(text) <= 7
        assert stats.n_steps <= stats.n_tokens <= stats.n_steps + stats.n_accepted
        assert stats.n_accepted <= stats.n_drafted < stats.n_rows
        assert cache.n_past == len(cache.tokens)


def test_an_abandoned_text_leaves_the_cache_with_what_was_generated() -> None:
    target = FakeTarget()
    slots = Slots(target, 1)
    text = WrittenText([1, 2, 3], slots.slots[0], [RandomTrees(5)])
    steps, cache = write(text, slots), text.cache
    written = [token for _ in range(4) for token in next(steps).tokens]
    text.end("cancelled")
    assert cache.tokens == [1, 2, 3, *written[:-1]]
    assert cache.n_seq > 1
    assert all(target.tokens_of(s) == cache.tokens for s in range(cache.n_seq))
