"""The steps of a text, for whoever asks for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.slots import Slots
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter
from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.meter import Draft, RecordedStep
from speculation.places import Places
from speculation.reply import Reply
from speculation.runtime import Runtime
from speculation.sampling import SamplingParams
from speculation.step import Batch, step
from tests.support.exact import EXACT, PROMPT, endless
from tests.support.fake_target import FakeTarget, plain_text, prompt_of
from tests.support.written import WrittenText, write


class Guesses(Drafter):
    """Drafts a tree after the text's second token, and another one after its fifth."""

    def promise(self, tokens: Sequence[int]) -> float:
        return float(tokens[-1] in (1, 9))

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        if tokens[-1] == 1:
            tree.add_chain(0, [2, 5])
            tree.add_chain(1, [7, 2])
        if tokens[-1] == 9:
            tree.add_chain(0, [6, 5, 4])


def test_a_step_tells_its_drafts_what_became_text_and_its_times() -> None:
    assert plain_text(26, n_tokens=8) == [8, 1, 2, 7, 2, 9, 6, 5]
    slots = Slots(FakeTarget(), 1)
    text = WrittenText(prompt_of(26), slots.slots[0], [Guesses()], n_tokens=8, record=True)
    list(write(text, slots))
    first = [Draft(-1, 2, "ar"), Draft(0, 5, "ar"), Draft(0, 7, "ar"), Draft(2, 2, "ar")]
    last = [Draft(-1, 6, "ar"), Draft(0, 5, "ar"), Draft(1, 4, "ar")]
    assert [one[3:] for one in text.reply.steps] == [
        (1, 1, [], [], 8),
        (1, 1, (), (), 1),
        (5, 1, first, [0, 2, 3], 9),
        (4, 1, last, [0, 1], None),  # the text ends in the middle of the path
    ]
    for one in text.reply.steps:
        assert min(one[:3]) >= 0 < one.decode_seconds
    assert (
        sum(map(sum, (one[:3] for one in text.reply.steps[1:]))) <= text.reply.stats.decode_seconds
    )


def test_the_steps_of_a_text_that_does_not_ask_for_them_are_not_kept() -> None:
    slots = Slots(FakeTarget(), 1)
    text = WrittenText(prompt_of(26), slots.slots[0], [Guesses()], n_tokens=8)
    list(write(text, slots))
    assert (text.reply.token_ids, text.reply.steps) == ([8, 1, 2, 7, 2, 9, 6, 5], [])


def test_a_step_tells_how_many_texts_share_its_decode() -> None:
    slots = Slots(FakeTarget(), 2)
    texts = [WrittenText(prompt_of(26), slot, n_tokens=4, record=True) for slot in slots.slots]
    batch = Batch(slots)
    for text in texts:
        assert text.next_piece(99) is None
    step(texts[:1], batch)
    while not texts[0].has_ended:
        step(texts, batch)
    step(texts[1:], batch)
    assert [[one.n_texts for one in text.reply.steps] for text in texts] == [
        [1, 2, 2, 2],
        [2, 2, 2, 1],
    ]


def on_a_device(*n_tokens: int) -> tuple[list[WrittenText], list[list[int]]]:
    """Texts that are written together, and how many steps of each are handed out after each."""
    target = FakeTarget()
    target.is_device = True
    slots = Slots(target, 2)
    texts = [
        WrittenText(prompt_of(26), slot, n_tokens=n)
        for slot, n in zip(slots.slots, n_tokens, strict=True)
    ]
    batch, seen = Batch(slots), []
    for text in texts:
        assert text.next_piece(99) is None
    while running := [text for text in texts if not text.has_ended]:
        step(running, batch)
        seen.append([len(text.emitted) for text in texts])
    return texts, seen


def test_tokens_are_handed_out_while_a_device_computes_the_next_step() -> None:
    texts, seen = on_a_device(4, 3)
    assert seen == [[0, 0], [1, 1], [2, 3], [4, 3]]  # the last ones at once
    assert [text.reply.token_ids for text in texts] == [plain_text(26, n_tokens=n) for n in (4, 3)]


def test_an_error_while_tokens_are_handed_out_ends_their_text_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand_out = WrittenText.hand_out

    def failing(text: WrittenText, n_texts: int = 1) -> None:
        if text.request.max_tokens == 4 and text._emitted and not text.has_ended:
            raise RuntimeError("a listener failed")
        hand_out(text, n_texts)

    monkeypatch.setattr(WrittenText, "hand_out", failing)
    texts, _ = on_a_device(4, 3)
    assert [str(text.reply.error) for text in texts] == ["a listener failed", "None"]
    assert texts[1].reply.token_ids == plain_text(26, n_tokens=3)


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[Engine]:
    """An engine whose steps take so long that ``auto`` drafts, however slow Python is."""
    cost = Cost(CostCurve.linear(1.0, 1e-6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "follow", lambda *step: None)
        patch.setattr(Runtime, "_first_cost", lambda runtime: cost)
        with Engine.load(tiny_model, EXACT) as engine:
            yield engine


@pytest.mark.parametrize(
    ("method", "own"), [("prompt-lookup", "prompt-lookup"), ("auto", "suffix")]
)
def test_each_draft_names_its_source_and_the_steps_add_up_to_the_text(
    drafting: Engine, method: str, own: str
) -> None:
    repeated = 8 * "the cat saw a dog "
    regex = {"regex": "(the (cat|dog) saw [a-z]{1,3} )+"}
    settings: dict[str, Any] = {"method": method, "max_tokens": 60, "record": True}
    for sampling, extra in (({}, set[str]()), (regex, {"structure"})):
        text = drafting.generate(repeated, sampling=sampling, **settings)
        steps, stats = text.run().steps, text.stats
        named = {draft.source for one in steps for draft in one.drafts}
        assert named == extra | {own}
        assert [token for one in steps for token in tokens_of(one)] == text.token_ids
        assert sum(len(one.drafts) for one in steps) == stats.n_drafted
        assert sum(len(one.path) for one in steps) == stats.n_accepted
        accepted = [one.drafts[node].source for one in steps for node in one.path]
        for source, n in stats.accepted_by_source.items():
            assert accepted.count(source) == n


def tokens_of(one: RecordedStep) -> list[int]:
    path = [one.drafts[node].token for node in one.path]
    return path if one.bonus is None else [*path, one.bonus]


def test_a_text_that_is_cancelled_counts_what_it_has_read(tiny_model: Path) -> None:
    params = replace(EXACT, n_batch=64)
    with Engine.load(tiny_model, params) as engine:
        text: Reply

        def progress(done: int, total: int) -> None:
            if done >= 128:
                text.cancel()

        text = engine.generate([5, 6] * 200, method="ar", progress=progress)
        assert text.run().finish_reason == "cancelled"
        assert (text.stats.n_prompt, text.stats.n_read, text.stats.n_tokens) == (400, 128, 0)
        assert text.stats.prefill_seconds > 0
        again = engine.generate([5, 6] * 200, method="ar", max_tokens=2).run()
        assert (again.stats.n_reused, again.stats.n_read) == (128, 272)


def test_time_for_other_texts_counts_and_so_do_the_first_steps_drafts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, paused = Places.leave, 0.0

    def slowly(places: Places) -> None:
        nonlocal paused
        for text in places.active():
            if text.meter.stats.n_steps and not text.has_ended:
                start = time.perf_counter()
                time.sleep(0.005)  # as if others were served
                paused += time.perf_counter() - start
        leave(places)

    monkeypatch.setattr(Places, "leave", slowly)
    text = engine.generate(PROMPT, method="ar", max_tokens=300, sampling=endless(engine)).run()
    assert text.stats.decode_seconds > paused > 0
    word = SamplingParams(grammar='root ::= "the cat saw"')
    forced = engine.generate(PROMPT, method="suffix", max_tokens=6, sampling=word).run().stats
    assert forced.n_first == forced.n_tokens > 1  # all came with the first step
    assert 0 < forced.first_seconds < forced.prefill_seconds
    assert forced.decode_seconds == 0
