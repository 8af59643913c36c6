"""Several texts at a time, on random models: each is what it would be alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from batching.cache import common_prefix
from batching.errors import CacheFull, InvalidParameter, PromptTooLong, SpeculationError
from batching.llama.context import Context
from batching.rows import Rows
from batching.target import Output
from batching.together import Coroutine, Running, Work, advance, run
from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.reply import Reply
from speculation.request import Request
from speculation.runtime import Runtime
from speculation.sampling import SamplingParams
from speculation.sequence import TokenSequence
from tests.support.exact import EXACT, PROMPT, endless, random_requests
from tests.support.fake_target import FakeReply
from tests.support.tiny_heads import write_gemma_gguf

METHODS = (
    "auto",
    "ar",
    "suffix:p_min=0.05",
    "suffix:branches=3,p_min=0.1",
    "recycling:nodes=12",
    "jacobi",
    "lookahead:window=3,ngram=3,guesses=3",
    "draft:p_min=0.02",
    "draft:width=3,nodes=10,p_min=0.01,draft_max=4",
)


@pytest.fixture(scope="module")
def parallel(tiny_model: Path) -> Iterator[Engine]:
    # How a prompt is read must not depend on how fast the machine is.
    cost = Cost(CostCurve.linear(1e-3, 1e-5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "follow", lambda *step: None)
        patch.setattr(Runtime, "_first_cost", lambda runtime: cost)
        with Engine.load(tiny_model, EXACT, parallel=4, draft_model=tiny_model) as engine:
            yield engine


def test_texts_that_come_and_go_are_what_they_would_be_alone(
    engine: Engine, parallel: Engine
) -> None:
    rng = random.Random(3)
    every = random_requests(rng, 120, METHODS, stop=((), (), ("o t",)))
    running: list[Reply] = []
    for request in every:
        running.append(parallel.submit(**request))
        time.sleep(rng.choice((0.0, 0.0, 0.01)))
    for request, found in zip(every, running, strict=True):
        alone = engine.generate(**{**request, "method": "ar"}).run()
        assert found.run().token_ids == alone.token_ids, request
        assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
        assert found.stats.n_tokens == len(alone.token_ids)


def test_a_long_prompt_is_read_in_a_context_of_its_own_and_shared_with_the_next(
    parallel: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prompt_rows = Context.decode, {True: 0, False: 0}

    def counting(context: Context, rows: Rows, *rest: Any) -> Output:
        prompt_rows[context is parallel.context] += list(rows.outputs).count(False)
        return decode(context, rows, *rest)

    monkeypatch.setattr(Context, "decode", counting)
    prompt = [13 + i % 90 for i in range(300)]  # no other text begins like these
    asked = ([*range(11, 31)], [*prompt, 5])
    short, long = parallel._driver.call(  # both begin with the same step
        lambda: [parallel.submit(one, method="ar", max_tokens=9) for one in asked]
    )
    assert (short.run().stats.n_reused, long.run().stats.n_reused) == (0, 0)
    after = parallel.submit([*prompt, 6], method="ar", max_tokens=4).run()
    assert after.stats.n_reused == 300
    assert prompt_rows == {False: 300, True: 19}


def test_a_beginning_that_several_requests_bring_at_once_is_read_once(parallel: Engine) -> None:
    prompt = [9 + i % 70 for i in range(300)]
    every = parallel.generate_batch([[*prompt, last] for last in range(5, 13)], max_tokens=20)
    reused = sorted(one.stats.n_reused for one in every)
    assert reused[0] < 32 and reused[1:] == [300] * 7
    # The end of a prompt is read with the first draft, so a wait for it would not end.
    again = parallel.generate_batch([[*prompt, 5], [*prompt, 5]], method="ar", max_tokens=3)
    assert again[0].token_ids == again[1].token_ids == every[0].token_ids[:3]


def test_prompts_that_wait_for_another_are_compared_with_it_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def counting(a: Sequence[object], b: Sequence[object]) -> int:
        compared.append(len(b))
        return common_prefix(a, b)

    monkeypatch.setattr("speculation.sequence.common_prefix", counting)
    prompt = [9 + i % 70 for i in range(400)]
    with Engine.load(tiny_model, EXACT, parallel=4) as engine:
        monkeypatch.setattr(engine._scheduler, "_long_prompts", None)
        monkeypatch.setattr(engine._scheduler, "_n_prompt_rows", lambda *_: 8)  # 50 steps
        steps: list[int] = []
        every = engine._driver.call(  # they begin with the same step
            lambda: [
                engine.submit([*prompt, last], max_tokens=9, progress=lambda n, _: steps.append(n))
                for last in range(5, 9)
            ]
        )
        reused = [one.run().stats.n_reused for one in every]
    assert reused == [0, 400, 400, 400] and len(steps) > 50
    assert len(compared) <= 2 * 3  # when they come, and when they begin


def test_a_prompt_is_read_in_large_pieces_after_texts_that_drafted_together(
    parallel: Engine,
) -> None:
    parallel.generate_batch([[*PROMPT.encode(), last] for last in range(9)], method="recycling")
    read: list[int] = []
    prompt = [90 - i % 70 for i in range(200)]
    parallel.submit(prompt, max_tokens=1, progress=lambda n, _: read.append(n)).run()
    assert read == [0]  # all at once, with the first token


def test_a_tree_is_cut_to_the_sequences_of_its_text(engine: Engine, tiny_model: Path) -> None:
    methods = ("recycling", "draft:width=4,nodes=20,p_min=0.01", "suffix:branches=6,p_min=0.1")
    sampled = "draft:width=4,nodes=20,p_min=0.01,verify=rejection"
    hot = SamplingParams(temperature=0.9, seed=5)
    with Engine.load(tiny_model, EXACT, draft_model=tiny_model, parallel=64) as narrow:
        assert narrow.context.n_seq_max == 256  # four for each text
        found = [narrow.submit(PROMPT, method=method, max_tokens=40) for method in methods]
        texts = [one.run().token_ids for one in found]
        drawn = narrow.submit(PROMPT, method=sampled, sampling=hot, max_tokens=40).run()
    plain = engine.generate(PROMPT, method="ar", max_tokens=40).run().token_ids
    assert texts == [plain] * 3
    assert all(one.stats.n_drafted > 0 for one in (*found, drawn))


def test_a_piece_of_a_prompt_takes_no_longer_than_others_may_wait(
    parallel: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = Cost(CostCurve.linear(0.05, 0.008))
    monkeypatch.setattr(parallel._scheduler._batch, "cost", cost)
    scheduler, plain = parallel._scheduler, Request((1,), parse_method("ar"))
    few, many = (
        [TokenSequence(plain, cast("Any", FakeReply())) for _ in range(n)] for n in (3, 60)
    )

    def n_rows(sequences: list[TokenSequence], n_writing: int) -> int:
        seconds = scheduler._seconds_to_read(n_writing, 0)
        return scheduler._n_prompt_rows(sequences, n_writing, seconds)

    row = cost.curve(0).at(64) / 64
    # 0.2 s beside two written texts, whose rows take 0.058 s; 1 s if nobody waits for a token.
    assert n_rows(few, 2) == int((0.2 - 0.058) / row) == 16
    assert n_rows(few, 0) == int(1.0 / row) == 115
    assert n_rows(many, 60) == 16
    for seconds in (0.4, 0.8):  # 100 rows of prompts that were read count as they were
        cost.has_read(100, seconds)
    assert n_rows(few, 0) == int(1.0 / 0.006) == 166
    cost.has_read(64, 6.4)  # while others took the processors
    assert n_rows(few, 0) == 64
    cheap = Cost(CostCurve.linear(0.001, 0.0001))
    monkeypatch.setattr(parallel._scheduler._batch, "cost", cheap)
    monkeypatch.setattr(parallel.context, "flash_attn", True)  # on a CPU: 63 rows in all
    assert n_rows(few, 2) == 60
    assert (n_rows(many, 50), n_rows(few, 0)) == (272, 320)


def test_an_idle_text_leaves_the_cache_and_comes_back_for_its_next_turn(tiny_model: Path) -> None:
    first, second = ([7 + (i * step) % 90 for i in range(200)] for step in (1, 3))
    with Engine.load(tiny_model, EXACT, parallel=3) as engine:
        places = engine._scheduler.places.places
        begun = engine.submit(first, method="ar", max_tokens=9).run()
        engine.submit(second, method="ar", max_tokens=9).run()
        assert [len(place.cache.tokens) for place in places].count(0) == 2
        turn = [*first, *begun.token_ids, 5]
        again = engine.submit(turn, method="ar", max_tokens=9).run()
        assert again.stats.n_reused == 200 + 9 - 1
        shared = engine.submit([*second[:150], 5], method="ar", max_tokens=9).run()
        assert shared.stats.n_reused == 150
        found = [again.token_ids, shared.token_ids]
    with Engine.load(tiny_model, EXACT) as alone:
        prompts = (turn, [*second[:150], 5])
        expected = [alone.generate(p, method="ar", max_tokens=9).run() for p in prompts]
    assert found == [text.token_ids for text in expected]


@pytest.mark.parametrize("window", [8, 40])
def test_texts_of_a_model_with_a_sliding_window_begin_with_parts_of_others(
    window: int, tmp_path: Path
) -> None:
    model = write_gemma_gguf(tmp_path / "gemma.gguf", influence=1.0, window=window)
    rng = random.Random(1)
    first, second = ([rng.randrange(5, 95) for _ in range(120)] for _ in range(2))
    rounds = [
        [[*first, 5], [*second, 6]],  # read beside each other
        [[*first[:60], 7, 8], [*second[:50], 9]],
        [[*first[:90], 11]],
        [[*second[:70], 12]],
    ]
    found, reused = [], []
    with Engine.load(model, EXACT, parallel=3) as engine:
        for prompts in rounds:
            every = engine._driver.call(  # they begin with the same step
                lambda prompts=prompts: [engine.submit(p, max_tokens=9) for p in prompts]  # type: ignore[misc]
            )
            found += [one.run().token_ids for one in every]
            reused += [one.stats.n_reused for one in every]
    with Engine.load(model, EXACT) as alone:
        for prompt, tokens in zip(itertools.chain(*rounds), found, strict=True):
            alone.call(lambda: alone.cache.truncate(0))
            assert tokens == alone.generate(prompt, method="ar", max_tokens=9).run().token_ids
    assert reused[:3] == [0, 0, 60]  # of a text in the cache, not of a copy


def test_a_text_uses_the_whole_context_if_no_other_needs_it(
    engine: Engine, parallel: Engine
) -> None:
    n_ctx = parallel.context.n_ctx
    sampling = endless(engine)
    for method in ("ar", "suffix"):
        long = parallel.submit([5, 6, 7], method=method, sampling=sampling).run()
        assert (long.finish_reason, len(long.token_ids)) == ("context", n_ctx - 2)
    for _ in range(2):  # the second time with the longest drafts
        method, half = "suffix:p_min=0.001", n_ctx // 2
        again = parallel.submit([5, 6, 7], method=method, sampling=sampling, max_tokens=half)
        assert again.run().finish_reason == "length"
    assert max(again.stats.rows_histogram) == 64
    # Idle texts make room; two long ones share what there is, until one of them ends.
    both = parallel.generate_batch(([8, 9], [9, 8]), method="ar", sampling=sampling)
    n_tokens = sorted(len(one.token_ids) for one in both)
    assert n_tokens[0] >= n_ctx // 4 - 64 and n_tokens[1] < n_ctx


def test_a_prediction_is_that_of_its_own_text_alone(parallel: Engine) -> None:
    prompts = (PROMPT, "a dog", PROMPT)
    plain = parallel.generate_batch(prompts, method="ar", max_tokens=40)
    predictions = (plain[0].token_ids, plain[1].token_ids, ())
    running = [
        parallel.submit(prompt, method="prediction", prediction=prediction, max_tokens=40)
        for prompt, prediction in zip(prompts, predictions, strict=True)
    ]
    assert [one.run().token_ids for one in running] == [one.token_ids for one in plain]
    assert [one.stats.n_accepted > 30 for one in running] == [True, True, False]
    assert running[2].stats.n_drafted == 0


def test_tokens_arrive_in_an_event_loop(parallel: Engine) -> None:
    async def text_of(prompt: str) -> str:
        generation = parallel.submit(prompt, method="ar", max_tokens=20)
        return "".join([token.text async for token in generation])

    async def both() -> list[str]:
        return [*await asyncio.gather(text_of(PROMPT), text_of("a dog"))]

    found = asyncio.run(both())
    assert found == [one.text for one in parallel.generate_batch((PROMPT, "a dog"), max_tokens=20)]


def test_a_text_that_was_read_ends_at_once_for_every_later_reader(parallel: Engine) -> None:
    async def read(text: Reply) -> str:
        return "".join([token.text async for token in text])

    def read_here(text: Reply) -> str:
        return "".join(token.text for token in text)

    def read_there(text: Reply) -> str:
        return asyncio.run(read(text))

    def fail(*_: int) -> None:
        raise ZeroDivisionError

    for first, second in itertools.product((read_here, read_there), repeat=2):
        text = parallel.submit(PROMPT, method="ar", max_tokens=9)
        assert first(text) == text.text
        assert second(text) == second(text) == ""
        failing = parallel.submit(PROMPT, method="ar", progress=fail)
        for reader in (first, second):
            with pytest.raises(ZeroDivisionError):
                reader(failing)


def test_a_second_reader_in_an_event_loop_is_told_and_takes_nothing(parallel: Engine) -> None:
    async def both() -> int:
        text = parallel.submit(PROMPT, method="ar", sampling=endless(parallel), max_tokens=400)
        n = 0
        async for _ in text:
            if not n:
                reader = aiter(text)
                with pytest.raises(SpeculationError, match="are being read by another reader"):
                    await anext(reader)
            n += 1
        return n

    assert asyncio.run(both()) == 400


def test_threads_that_read_a_text_at_once_share_its_tokens(parallel: Engine) -> None:
    text = parallel.submit(PROMPT, method="ar", max_tokens=30)
    with ThreadPoolExecutor(3) as threads:
        taken = [*threads.map(lambda _: list(text), range(3))]
    assert sum(map(len, taken)) == 30 and text.finish_reason == "length"


def test_ctrl_c_in_a_batch_ends_all_of_its_texts(
    parallel: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(text: Reply) -> Reply:
        raise KeyboardInterrupt

    started: list[Reply] = []
    submit = parallel._scheduler.submit

    def submit_noted(text: TokenSequence) -> bool:
        started.append(text.reply)
        return submit(text)

    monkeypatch.setattr(parallel._scheduler, "submit", submit_noted)
    whole: list[str | list[int]] = [PROMPT] * 6
    for stop, prompts, error in (
        (interrupt, whole, KeyboardInterrupt),
        (Reply.run, [*whole, []], InvalidParameter),
    ):
        started.clear()
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(Reply, "run", stop)
            parallel.generate_batch(prompts, sampling=endless(parallel))
        assert started and [text.run().finish_reason for text in started] == (
            ["cancelled"] * len(started)
        )


def test_tokens_that_come_fast_go_together_but_do_not_wait_for_a_prompt(
    parallel: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.sequence.FRAME_SECONDS", 1e9)

    def groups_of(text: Reply) -> list[int]:
        return [len(tokens) for tokens in text._channel]

    assert groups_of(parallel.submit(PROMPT, method="ar", max_tokens=30)) == [1, 29]
    started: list[Reply] = []
    others: list[Reply] = []
    seen: list[int] = []

    def ask_in_between(token: int) -> bool:
        seen.append(token)
        if len(seen) == 20:
            others.append(parallel.submit([7 + i % 60 for i in range(60)], max_tokens=2))
        return False

    def begin() -> None:
        started.append(parallel.submit(PROMPT, method="ar", max_tokens=30))
        started[0]._written.ends = Ends(ask_in_between)

    parallel._driver.call(begin)
    groups = groups_of(started[0])
    assert len(groups) == 3 and sum(groups) == 30
    assert len(others[0].run().token_ids) == 2


class Ends:
    """Asks ``is_end`` for each token whether it may end a text."""

    def __init__(self, is_end: Callable[[int], bool]) -> None:
        self._is_end = is_end

    def __contains__(self, token: object) -> bool:
        assert isinstance(token, int)
        return self._is_end(token)


def test_lookahead_has_its_whole_window_beside_other_texts(
    engine: Engine, parallel: Engine
) -> None:
    """Its rows have one form. With less of a batch than that it drafts nothing."""
    methods = ["lookahead"] * 6 + ["ar", "suffix"]
    plain = engine.generate(PROMPT, method="ar", max_tokens=30).run().token_ids
    running = [parallel.submit(PROMPT, method=method, max_tokens=30) for method in methods]
    assert [text.run().token_ids for text in running] == [plain] * 8
    for text in running[:6]:
        rows = dict(text.stats.rows_histogram)
        assert rows.pop(1, 0) <= 1, rows  # the last token needs no drafts
        assert min(rows) >= 59, rows  # the window; n-grams come on top
    for wide, reason in (
        ("lookahead:window=24,ngram=15,guesses=15", r"decodes \d+ rows at a time, but a batch has"),
        ("lookahead:window=30", "needs .* sequences, a text has 40"),
    ):
        with pytest.raises(InvalidParameter, match=reason):
            parallel.submit(PROMPT, method=wide, max_tokens=3).run()


def test_each_client_has_a_memory_of_its_own(parallel: Engine) -> None:
    prompt = [11 + i % 5 for i in range(20)]

    def steps(memory: str | None) -> int:
        text = parallel.submit(prompt, method="suffix", memory=memory, max_tokens=60).run()
        return text.stats.n_steps

    half = steps(None) / 2  # about: what is learnt of drafts in general is for all
    assert min(steps(None), steps("one"), steps("two"), steps("")) > half
    assert max(steps("one"), steps("")) < half
    for i in range(40):  # the memories of clients that come no more are dropped
        steps(f"client {i}")
    assert len(parallel.resources.kept.memories) == 32
    assert steps("one") > half


def test_a_draft_model_reads_a_prefix_of_several_texts_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [7 + i % 90 for i in range(200)]
    with Engine.load(tiny_model, EXACT, draft_model=tiny_model, parallel=4) as engine:
        n_read: list[int] = []
        decode = Context.decode

        def counted(self: Context, rows: Rows, *rest: Any) -> object:
            if self is engine.draft:
                n_read.extend(rows.positions)
            return decode(self, rows, *rest)

        monkeypatch.setattr(Context, "decode", counted)
        first = engine.submit([*prompt, 5], method="draft", max_tokens=200)
        next(first)
        assert n_read[:201] == [*range(201)]
        n_read.clear()
        second = engine.submit([*prompt, 6], method="draft", max_tokens=9).run()
        assert second.stats.n_reused == 200
        assert min(n_read) == 200
        first.run()


def test_an_error_in_shared_work_ends_only_those_who_do_not_expect_it() -> None:
    def fail(parts: Sequence[int]) -> list[int]:
        raise CacheFull("full")

    def double(parts: Sequence[int]) -> list[int]:
        calls.append(list(parts))
        return [2 * part for part in parts]

    def careful() -> Coroutine[None]:
        try:
            yield Work(fail, 1)
        except CacheFull:
            results.append((yield Work(double, 5)))

    def careless() -> Coroutine[None]:
        yield Work(fail, 2)

    def other() -> Coroutine[None]:
        results.append((yield Work(double, 3)))
        results.append((yield Work(double, 4)))

    calls: list[list[int]] = []
    results: list[int] = []
    running = [Running(careful()), Running(careless()), Running(other())]
    while any(one.work for one in running):
        advance(running)
    assert calls == [[3], [5, 4]]
    assert results == [6, 10, 8]
    assert [type(one.error) for one in running] == [type(None), CacheFull, type(None)]
    with pytest.raises(CacheFull):
        run(careless())


def test_a_text_is_no_longer_than_the_model_was_trained_for_however_large_the_context(
    tiny_model: Path,
) -> None:
    with Engine.load(tiny_model, EXACT, n_ctx=1024, parallel=2) as engine:
        assert (engine.context.n_ctx, engine.context.text_limit) == (1024, 512)
        with pytest.raises(PromptTooLong, match="trained for 512"):
            engine.generate([5] * 600)
        texts = engine.generate_batch(([8, 9], [9, 8]), method="ar", sampling=endless(engine))
        assert [(one.finish_reason, len(one.token_ids)) for one in texts] == [("context", 511)] * 2
