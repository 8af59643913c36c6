"""One engine and several threads: each gets its text, and the process survives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from batching.errors import ContextError, ModelError, OutOfMemory, SpeculationError
from batching.llama.context import Context
from batching.tree import TokenTree
from batching.watched import checkpoint
from speculation import runtime
from speculation.drafter import DraftBudget, Drafter, MethodSpec, PlainSteps, Requirements, Step
from speculation.driver import Driver
from speculation.engine import Engine
from speculation.reply import Reply
from speculation.sampling import SamplingParams
from tests.support.exact import EXACT, PROMPT
from tests.support.paths import ROOT

ENDLESS = SamplingParams(grammar="root ::= [a-z] root")
ENDED = {"cancelled", "context"}  # on a slow day a thread comes when the small context is full


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, EXACT) as made:
        yield made


@pytest.fixture(scope="module")
def several(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, EXACT, parallel=4) as made:
        yield made


def in_threads(*works: Callable[[], object]) -> None:
    """Run all of ``works`` at once; fail if one does not end."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


def test_threads_get_their_texts_and_end_those_of_others(engine: Engine) -> None:
    expected = engine.generate(PROMPT, method="ar", max_tokens=6).run().token_ids
    found: list[list[int]] = []

    def work(i: int) -> None:
        for n in range(25):
            # The third thread lets the context be replaced, again and again.
            method = f"lookahead:window=3,ngram=3,guesses={2 + n}" if i == 2 else "prompt-lookup"
            found.append(engine.generate(PROMPT, method=method, max_tokens=6).run().token_ids)

    in_threads(*[lambda i=i: work(i) for i in range(4)])
    assert found == [expected] * 100
    text = engine.generate(PROMPT, method="ar", sampling=ENDLESS)
    next(text)
    in_threads(lambda: engine.call(lambda: engine.cache.truncate(0)), engine.prepare)
    assert text.run().finish_reason in ENDED
    assert engine.generate(PROMPT, method="ar", max_tokens=4).run().stats.n_reused == 0


def test_a_callback_can_start_texts_but_not_wait_for_them(engine: Engine) -> None:
    started: list[Reply] = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(SpeculationError, match="cannot wait for itself"):
            engine.close()
        started.append(engine.generate(PROMPT, method="ar", max_tokens=3))
        with pytest.raises(SpeculationError, match="cannot wait for itself"):
            started[-1].run()

    text = engine.generate(PROMPT, method="ar", max_tokens=5, progress=progress).run()
    assert text.stats.n_tokens == 5
    assert [next(one).id for one in started] == [text.token_ids[0]] * len(started)


def test_closing_ends_everything_whoever_closes_and_whenever(tiny_model: Path) -> None:
    for _ in range(5):
        engine = Engine.load(tiny_model, EXACT, parallel=2)
        engine.prepare()  # the first close saves the measured costs
        running = [engine.submit(PROMPT, method="ar", sampling=ENDLESS) for _ in range(5)]
        next(running[0])
        late: list[Reply] = []

        def submit(engine: Engine = engine, late: list[Reply] = late) -> None:
            try:
                while True:
                    late.append(engine.submit(PROMPT, method="ar", max_tokens=3))
            except ModelError as error:
                assert "is closed; load it again" in str(error)

        in_threads(engine.close, engine.close, submit, submit)
        assert {text.run().finish_reason for text in running} <= ENDED
        assert {text.run().finish_reason for text in late} <= {"length", "stop", "cancelled"}
        in_threads(engine.close)
        uses: list[Callable[[], object]] = [partial(engine.call, int), engine.prepare]
        uses += [partial(engine.generate, "hi"), partial(engine.generate, [1, 2])]
        uses.append(partial(engine.chat, "hi"))
        for use in uses:
            with pytest.raises(ModelError, match="is closed; load it again"):
                in_threads(use)


class Raising(Drafter):
    """Raises an error in one of its methods, and perhaps in ``end``."""

    def __init__(self, where: str, error: type[BaseException], *, in_end: bool) -> None:
        self._where, self._error, self._in_end = where, error, in_end

    def _may_raise(self, where: str) -> None:
        if where == self._where or (where == "end" and self._in_end):
            raise self._error(f"in {where}")

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        self._may_raise("requires")
        return Requirements()

    def begin(self, prompt: object) -> None:
        self._may_raise("begin")

    def draft(self, tokens: object, tree: TokenTree, budget: DraftBudget) -> None:
        self._may_raise("draft")
        if budget.room(tree):
            tree.add(0, 5)

    def observe(self, step: Step) -> None:
        self._may_raise("observe")

    def observe_plain(self, steps: PlainSteps) -> None:
        self._may_raise("observe_plain")

    def promise(self, tokens: object) -> float:
        self._may_raise("promise")
        return float(self._where != "observe_plain")

    def end(self, tokens: object) -> None:
        self._may_raise("end")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("in_end", [False, True])
@pytest.mark.parametrize(
    "where", ["make", "requires", "begin", "draft", "observe", "observe_plain", "promise", "end"]
)
def test_what_a_drafter_raises_ends_its_text_alone(
    several: Engine, where: str, in_end: bool, error: type[BaseException]
) -> None:
    def make(params: object, resources: object) -> Drafter:
        if where == "make":
            raise error("in make")
        return Raising(where, error, in_end=in_end)

    spec = MethodSpec(name="raising", title="Raising", make=make)
    plain = several.submit(PROMPT, method="ar", max_tokens=30).run().token_ids
    beside = [several.submit(PROMPT, method="ar", max_tokens=30) for _ in range(2)]
    for _ in range(2):  # alone, too
        failing = several.submit(PROMPT, method=spec, max_tokens=8)
        expected = ValueError if error is ValueError else RuntimeError
        with pytest.raises(expected, match=f"in {where}"):
            failing.run()
        assert failing.finish_reason is None
        assert [text.run().token_ids for text in beside] == [plain] * 2
    assert several.submit(PROMPT, method="ar", max_tokens=30).run().token_ids == plain


def test_what_a_listener_or_a_callback_raises_ends_its_text_alone(several: Engine) -> None:
    def fail(*_: object) -> None:
        raise ValueError("nobody listens")

    plain = several.submit(PROMPT, method="ar", max_tokens=9).run().token_ids
    beside = several.submit(PROMPT, method="ar", max_tokens=9)
    several.submit(PROMPT, method="ar", max_tokens=9).forward(fail)
    with pytest.raises(ValueError, match="nobody listens"):
        several.submit(PROMPT, method="ar", max_tokens=9, progress=fail).run()
    assert beside.run().token_ids == plain
    assert several.submit(PROMPT, method="ar", max_tokens=9).run().token_ids == plain


def test_an_engine_without_a_context_says(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Context:
        raise OutOfMemory("no memory")

    engine = Engine.load(tiny_model, replace(EXACT, n_seq_max=2))
    monkeypatch.setattr(runtime, "Context", fail)
    with pytest.raises(OutOfMemory):
        engine.generate(PROMPT, method="suffix:branches=6", max_tokens=3).run()
    for method in ("ar", "prompt-lookup"):
        with pytest.raises(ContextError, match="is closed; create it or load the model again"):
            engine.generate(PROMPT, method=method, max_tokens=3).run()
    engine.close()


def test_requests_learn_how_many_are_ahead(several: Engine) -> None:
    ahead: dict[int, list[int]] = {1: [], 2: []}

    def steps() -> list[Reply]:
        running = [several.submit("a dog", method="ar", max_tokens=20) for _ in range(4)]
        waiting = [
            several.submit("a dog", method="ar", max_tokens=2, waiting=ahead[i].append)
            for i in (1, 2)
        ]
        for _ in range(2):
            several._scheduler.step()
        assert (several.n_running, several.n_waiting, ahead) == (4, 2, {1: [1], 2: [2]})
        running[0].cancel()
        several._scheduler.step()
        assert (several.n_running, several.n_waiting, ahead) == (4, 1, {1: [1, 0], 2: [2, 1]})
        return [*running, *waiting]

    texts = several._driver.call(steps)
    reasons = [text.run().finish_reason for text in texts]
    assert (reasons[0], reasons[-2:]) == ("cancelled", ["length"] * 2)


def run_script(tiny_model: Path, script: str) -> subprocess.CompletedProcess[str]:
    code = f"""
import os, sys, threading
from speculation import ContextParams, Engine, SamplingParams
engine = Engine.load({str(tiny_model)!r}, ContextParams(n_ctx=512, n_threads=1))
endless = SamplingParams(grammar='root ::= [a-z] root')
text = engine.generate('the cat', method='ar', sampling=endless)
next(text)
"""
    command = [sys.executable, "-c", code + script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "threading.Thread(target=text.run, daemon=True).start()",
        "engine.model.close(); text.cancel()",
        "engine.context.close(); text.cancel()",
    ],
)
def test_a_program_may_end_during_a_reply(tiny_model: Path, end: str) -> None:
    done = run_script(tiny_model, end)
    assert (done.returncode, done.stderr) == (0, "")


FORKS = """
import asyncio
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))

async def read():
    async for token in text:
        pass

for use in (
    lambda: engine.generate('the', max_tokens=2), text.run, lambda: next(text),
    lambda: list(text), lambda: asyncio.run(read()),
):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_to_load_the_model_itself(tiny_model: Path) -> None:
    done = run_script(tiny_model, FORKS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line in lines:
        assert (
            line.startswith("SpeculationError") and "a forked child cannot use it; load it" in line
        )


def test_idle_work_is_given_up_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculation.driver._IDLE_SECONDS", 0.01)
    began, done, n_tries = threading.Event(), threading.Event(), 0

    def work() -> None:
        nonlocal n_tries
        n_tries += 1
        began.set()
        while n_tries == 1:
            checkpoint()
        done.set()

    driver = Driver("a model")
    driver.idle = work
    driver.wake()
    assert began.wait(20)
    assert driver.call(lambda: 7) == 7
    assert done.wait(20)
    driver.close(lambda: None)
    assert n_tries == 2


def test_a_cost_is_guessed_at_first_and_measured_when_the_engine_is_idle(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECULATION_CACHE", str(tmp_path))
    monkeypatch.setattr("speculation.driver._IDLE_SECONDS", 600.0)
    with Engine.load(tiny_model, EXACT) as engine:
        text = engine.generate(PROMPT, method="auto", sampling=ENDLESS)
        next(text)
        guessed = engine.resources.cost
        assert guessed.is_rough
        assert guessed.near.at(8) == pytest.approx(3.6 * guessed.near.at(1))
        engine.prepare()  # while a text is written
        assert engine.resources.cost is guessed
        assert guessed.near.at(8) != pytest.approx(3.6 * guessed.near.at(1), rel=1e-6)
        assert len(text.run().token_ids) > 1
