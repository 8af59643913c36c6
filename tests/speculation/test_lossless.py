"""Every method gives plain decoding's text: greedy and seeded, on a fake target that checks its KV.

Random trees are among the methods: if every tree is lossless, so is that of every method.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from batching.cache import SequenceCache
from batching.rows import Rows
from batching.slots import Slot, Slots
from batching.tree import NO_LIMIT
from speculation.drafting.cost import Cost, CostCurve
from speculation.methods import METHODS as TABLE
from speculation.methods import parse_method
from speculation.sequence import TokenSequence
from speculation.step import Batch, step
from tests.support.fake_methods import METHODS, RandomTrees, drafters_of, resources, run
from tests.support.fake_target import FakeSampler, FakeTarget, plain_text, prompt_of
from tests.support.written import WrittenText, write


@pytest.fixture(autouse=True)
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods loaded from files must not become sources of ``auto`` in other tests."""
    monkeypatch.setattr(TABLE, "_specs", dict(TABLE._specs))


FULL = {"n_ctx": 40, "n_tokens": 100}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (50, {}),
    "seeded with penalties": (50, {"temperature": 0.8, "penalty": 1.0}),
    "nearly full context": (30, FULL),
    "one row back": (10, {"n_rewind": 1}),
    "five rows back": (10, {"n_rewind": 5}),
    "one row back, seeded and full": (10, {"n_rewind": 1, "temperature": 0.8, **FULL}),
    "five rows back, seeded and full": (10, {"n_rewind": 5, "temperature": 0.8, **FULL}),
}
NOT_BACK = ("lookahead", "random-trees", "all-in-one-tree")  # their branches need a whole cache


TREES = ("random-trees", "unnamed-trees", "all-in-one-tree")


@pytest.mark.parametrize(
    ("way", "method"),
    [
        (way, method)
        for way, (_, settings) in WAYS.items()
        for method in (*METHODS, *TREES)
        if "n_rewind" not in settings or not method.startswith(NOT_BACK)
    ],
)
def test_text_equals_plain_decoding(way: str, method: str) -> None:
    n_seeds, settings = WAYS[way]
    plain = {name: value for name, value in settings.items() if name != "n_rewind"}
    for seed in range(n_seeds):
        assert run(method, seed, **settings)[0] == plain_text(seed, **plain), f"seed {seed}"


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
        recurrent = parse_method(method).drafters(resources(method, n_rewind, draft_rewind=0))
        text, stats, _ = run(method, seed, n_rewind=n_rewind, drafters=recurrent)
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
WITH_HEADS = (
    *("medusa", "auto:sources=medusa", "redrafter"),
    *("eagle-1", "eagle-2", "auto:sources=eagle", "eagle-3:depth=3,top_k=2,nodes=5"),
)


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
        steps = [run(method, seed, n_rewind=n_rewind)[1] for seed in range(20)]
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
