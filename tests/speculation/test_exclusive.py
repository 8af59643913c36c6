"""One engine and several threads: all but one are refused, and the process survives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batching.errors import EngineInUse
from speculation.engine import Engine
from tests.support.exact import EXACT, PROMPT


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, EXACT) as made:
        yield made


def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` in another thread, and return or raise its result."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


USES: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate("ho", method="ar"),
    "reserve": lambda engine: engine.reserve(200),
    "prepare": lambda engine: engine.prepare(),
    "stop": lambda engine: engine.stop_running(),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_another_thread_is_refused_during_and_between_steps(
    engine: Engine, use: Callable[[Engine], object]
) -> None:
    plain = engine.generate(PROMPT, method="ar", max_tokens=8).run().token_ids
    refused = 0

    def cancelled() -> bool:
        nonlocal refused
        with pytest.raises(EngineInUse, match="another thread is generating"):
            in_thread(lambda: use(engine))
        refused += 1
        return False

    text = engine.generate(PROMPT, method="ar", max_tokens=8, cancelled=cancelled)
    for _ in text:
        with pytest.raises(EngineInUse, match="another thread is generating"):
            in_thread(lambda: use(engine))
    assert text.token_ids == plain
    assert refused >= 8


@pytest.mark.parametrize("use", [USES["generate"], USES["reserve"], USES["close"]])
def test_calls_from_a_callback_during_a_step_are_refused(
    engine: Engine, use: Callable[[Engine], object]
) -> None:
    def progress(done: int, total: int) -> None:
        with pytest.raises(EngineInUse):
            use(engine)

    text = engine.generate(PROMPT, method="ar", max_tokens=5, progress=progress).run()
    assert text.stats.n_tokens == 5


def test_the_thread_that_iterates_may_start_another_text_reserve_or_close(engine: Engine) -> None:
    for use in (USES["generate"], USES["reserve"], USES["close"]):
        text = engine.generate(PROMPT, max_tokens=20)
        tokens = iter(text)
        next(tokens)
        use(engine)
        assert list(tokens) == []
        assert text.finish_reason == "cancelled"


def test_an_unfinished_text_does_not_block_another_thread(engine: Engine) -> None:
    for _ in engine.generate(PROMPT, max_tokens=20):
        break
    done = in_thread(lambda: engine.generate(PROMPT, method="ar", max_tokens=4).run())
    assert done.stats.n_tokens == 4


def test_a_text_replaced_by_another_thread_raises_an_error(engine: Engine) -> None:
    text = engine.generate(PROMPT, max_tokens=4)
    in_thread(lambda: engine.generate(PROMPT, max_tokens=4))
    with pytest.raises(EngineInUse):
        text.run()


def test_threads_that_share_an_engine_get_their_text_or_are_refused(engine: Engine) -> None:
    """Without a lock this crashes the process within a few texts."""
    expected = engine.generate(PROMPT, method="ar", max_tokens=6).run().token_ids
    start, results = threading.Barrier(4), []

    def work(i: int) -> None:
        start.wait()
        for n in range(25):
            try:
                if i == 3 and n % 5 == 0:
                    engine.reserve(2 + n)
                text = engine.generate(PROMPT, method="prompt-lookup", max_tokens=6).run()
                results.append(text.token_ids == expected)
            except EngineInUse:  # noqa: PERF203
                results.append(True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 100
    assert engine.generate(PROMPT, method="ar", max_tokens=6).run().token_ids == expected
