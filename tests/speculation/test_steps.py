"""The steps of a text for whoever asks, and runs of plain steps, which change no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import Rows
from batching.slots import Slots
from batching.target import Output
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.source import Source
from speculation.chat.detokenizer import ReplyText
from speculation.drafter import DraftBudget, Drafter, PlainSteps, Step
from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.meter import Draft, RecordedStep
from speculation.methods.prompt_lookup import PromptLookup, PromptLookupParams
from speculation.places import Places
from speculation.reply import Reply
from speculation.runtime import Runtime
from speculation.sampling import SamplingParams
from speculation.step import Batch, step
from tests.support.exact import EXACT, PROMPT, endless
from tests.support.fake_target import FakeSampler, FakeTarget, plain_text, prompt_of
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


def test_a_step_tells_its_drafts_and_times_if_asked() -> None:
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


def test_an_error_in_handing_out_ends_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_each_draft_names_its_source(drafting: Engine, method: str, own: str) -> None:
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


def test_time_for_other_texts_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a run gets must not depend on how fast the machine is."""
    monkeypatch.setattr("speculation.sequence.FRAME_SECONDS", 1e9)


def written(
    prompt: Sequence[int], drafters: Sequence[Drafter], n_tokens: int = NO_LIMIT,
    is_wanted: Callable[[], bool] = lambda: False,
) -> WrittenText:  # fmt: skip
    slots = Slots(FakeTarget(), 1)
    text = WrittenText(prompt, slots.slots[0], drafters, n_tokens=n_tokens)
    list(write(text, slots, is_wanted))
    return text


class Waiting(Drafter):
    """Never drafts, but would after some tokens."""

    def __init__(self, after: Sequence[int] = ()) -> None:
        self._after = after
        self.n_asked = 0
        self.runs: list[list[int]] = []

    def promise(self, tokens: Sequence[int]) -> float:
        return float(tokens[-1] in self._after)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self.n_asked += 1

    def observe_plain(self, steps: PlainSteps) -> None:
        assert len(steps.tokens) == len(steps.seconds)
        self.runs.append(list(steps.tokens))


def test_steps_without_drafts_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(prompt_of(26), [], 10)
    steps, stats = text.emitted, text.reply.stats
    assert [len(step.tokens) for step in steps] == [1, 9]
    assert [step.finish_reason for step in steps] == [None, "length"]
    assert [token for step in steps for token in step.tokens] == plain_text(26, n_tokens=10)
    assert (stats.n_steps, stats.n_tokens, stats.n_rows, stats.n_drafted) == (10, 10, 10, 0)
    assert stats.rows_histogram == stats.tokens_histogram == {1: 10}
    assert stats.decode_seconds >= sum(stats.phase_seconds.values()) > 0
    assert plain_text(26, n_tokens=8) == [8, 1, 2, 7, 2, 9, 6, 5]
    drafter = Waiting([7, 6])
    steps = written(prompt_of(26), [drafter], 8).emitted
    assert [step.tokens for step in steps] == [[8], [1, 2, 7], [2], [9, 6], [5]]
    assert drafter.runs == [[1, 2, 7], [9, 6]]
    assert drafter.n_asked == 3  # also in the first step, which decodes the end of the prompt
    answers = iter([False, False, True])
    steps = written(prompt_of(26), [], 8, lambda: next(answers, False)).emitted
    assert [len(step.tokens) for step in steps] == [1, 3, 4]
    monkeypatch.setattr("speculation.sequence.FRAME_SECONDS", -1.0)
    steps = written(prompt_of(26), [], 5).emitted
    assert [len(step.tokens) for step in steps] == [1, 1, 1, 1, 1]


def test_an_error_in_a_run_keeps_the_tokens_generated_before_it() -> None:
    class Failing(FakeSampler):
        def sample(self, output: Output, row: int) -> int:
            if len(self.seen) == 4:
                raise ValueError("no token is allowed here")
            return super().sample(output, row)

    slots, prompt = Slots(FakeTarget(), 1), prompt_of(26)
    text = WrittenText(prompt, slots.slots[0], sampler=Failing(0, 0))
    with pytest.raises(ValueError, match="no token is allowed here"):
        list(write(text, slots))
    assert [step.tokens for step in text.emitted] == [[8], [1, 2, 7]]
    assert text.cache.tokens == [*prompt, 8, 1, 2]
    assert text.reply.token_ids == [8, 1, 2, 7]


class AlwaysAsked(Drafter):
    """A drafter that is asked in every step, because it does not tell what its draft promises."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.requires = drafter.requires

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._drafter.draft(tokens, tree, budget)

    def observe(self, step: Step) -> None:
        self._drafter.observe(step)


@pytest.mark.parametrize("settings", [{}, {"draft": 3}, {"max_ngram": 2}])
def test_prompt_lookup_drafts_the_same_with_and_without_plain_runs(settings: Any) -> None:
    params, n_runs = PromptLookupParams(**settings), 0
    for seed in range(60):
        prompt = prompt_of(seed)[:4]
        one = written(prompt, [PromptLookup(params)], 40)
        runs, quick = one.emitted, one.reply.stats
        asked = written(prompt, [AlwaysAsked(PromptLookup(params))], 40).reply.stats
        assert (quick.n_steps, quick.n_drafted) == (asked.n_steps, asked.n_drafted)
        assert quick.rows_histogram == asked.rows_histogram
        n_runs += len(runs) < quick.n_steps
    assert n_runs > 20


def test_auto_decodes_plainly_while_no_source_has_evidence() -> None:
    drafter = Waiting()
    cost = Cost(CostCurve.linear(1.0, 0.46))
    auto = Auto(AutoParams(), [Source("waiting", drafter)], cost)
    written(prompt_of(26), [auto], 30)
    assert drafter.n_asked == 0
    assert sum(map(len, drafter.runs)) == 29


def test_a_row_of_a_run_is_decoded_like_any_other(tiny_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with Model(tiny_model) as model:
        params = ContextParams(n_ctx=64, n_seq_max=4, n_threads=1)
        with Context(model, params) as plain, Context(model, params, trace=trace) as traced:
            for context in (plain, traced):
                context.decode(Rows([3, 4], range(2), [range(2)] * 2, [False, True]))
            for position, token in enumerate((5, 6, 7), 2):
                expected = traced.decode_row(token, position, range(2)).logits(0)
                found = plain.decode_row(token, position, range(2))
                assert np.array_equal(found.logits(0), expected)
                assert found.argmax(0) == int(expected.argmax())
            plain.seq_cp(0, 3, 0, 5)
            batch = Rows([8, 9], [5, 5], [range(1), range(3, 4)], [True, True])
            assert plain.decode(batch).logits(1).shape == (model.n_vocab,)
    lines = trace.read_text(encoding="utf-8").splitlines()[1:]
    assert lines == ["[[5,2,[0,1],1]]", "[[6,3,[0,1],1]]", "[[7,4,[0,1],1]]"]


def test_a_text_with_stop_strings_may_end_with_any_token(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        assert model.ends == {2, 262}
        assert ReplyText(model).ends == {2, 262}
        assert ReplyText(model, ["the"]).ends == range(model.n_vocab)
