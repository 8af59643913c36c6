"""Plain steps: those without drafts are decoded in runs; text and drafts stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from speculation.methods.prompt_lookup import PromptLookup, PromptLookupParams
from tests.support.fake_target import FakeSampler, FakeTarget, plain_text, prompt_of
from tests.support.written import WrittenText, write


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a run gets must not depend on how fast the machine is."""
    monkeypatch.setattr("speculation.sequence.FRAME_SECONDS", 1e9)


def written(
    prompt: Sequence[int],
    drafters: Sequence[Drafter],
    n_tokens: int = NO_LIMIT,
    is_wanted: Callable[[], bool] = lambda: False,
) -> WrittenText:
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


def test_without_drafters_all_steps_after_the_first_form_one_run() -> None:
    text = written(prompt_of(26), [], 10)
    steps, stats = text.emitted, text.reply.stats
    assert [len(step.tokens) for step in steps] == [1, 9]
    assert [step.finish_reason for step in steps] == [None, "length"]
    assert [token for step in steps for token in step.tokens] == plain_text(26, n_tokens=10)
    assert (stats.n_steps, stats.n_tokens, stats.n_rows, stats.n_drafted) == (10, 10, 10, 0)
    assert stats.rows_histogram == stats.tokens_histogram == {1: 10}
    assert stats.decode_seconds >= sum(stats.phase_seconds.values()) > 0


def test_a_run_ends_where_a_drafter_would_draft() -> None:
    assert plain_text(26, n_tokens=8) == [8, 1, 2, 7, 2, 9, 6, 5]
    drafter = Waiting([7, 6])
    steps = written(prompt_of(26), [drafter], 8).emitted
    assert [step.tokens for step in steps] == [[8], [1, 2, 7], [2], [9, 6], [5]]
    assert drafter.runs == [[1, 2, 7], [9, 6]]
    assert drafter.n_asked == 3  # also in the first step, which decodes the end of the prompt


def test_a_run_ends_with_the_present_step_if_something_else_is_wanted() -> None:
    answers = iter([False, False, True])
    steps = written(prompt_of(26), [], 8, lambda: next(answers, False)).emitted
    assert [len(step.tokens) for step in steps] == [1, 3, 4]


def test_a_run_that_exceeds_its_time_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
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
