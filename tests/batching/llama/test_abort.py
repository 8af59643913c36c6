"""Decodes that take seconds: progress within a decode, and aborting it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from batching.errors import CannotRewind, ContextError
from batching.llama.abort import DecodeWatch
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import Rows, text_rows
from batching.target import Cancelled
from speculation.engine import Engine
from speculation.reply import Reply
from tests.support.tiny_gguf import write_hybrid_gguf, write_tiny_gguf

PARAMS = ContextParams(n_ctx=512, kv_type="f32", flash_attn="off")
PROMPT = [5 + i % 7 + i % 3 for i in range(300)]


@pytest.fixture(autouse=True)
def _every_decode_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batching.llama.abort._SLOW", 0.0)
    monkeypatch.setattr("batching.llama.abort._POLL_SECONDS", 0.0)


@pytest.fixture(params=[write_tiny_gguf, write_hybrid_gguf], ids=["tiny", "hybrid"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with Engine.load(request.param(tmp_path / "model.gguf"), PARAMS) as made:
        yield made


def aborted(engine: Engine, after: int, prompt: Sequence[int] = PROMPT) -> tuple[Reply, list[int]]:
    """Start a text, abort it after ``after`` progress reports, and return those too."""
    reported: list[int] = []
    started: list[Reply] = []

    def progress(done: int, total: int) -> None:
        reported.append(done)
        if len(reported) == after:
            started[0].cancel()

    def start() -> None:  # before the engine's first step
        started.append(engine.generate(prompt, method="ar", max_tokens=8, progress=progress))

    engine.call(start)
    return started[0].run(), reported


@pytest.mark.parametrize(("n_cached", "n_prompt"), [(0, 300), (100, 300), (100, 104)])
def test_an_aborted_prompt_keeps_what_was_read(
    engine: Engine, n_cached: int, n_prompt: int
) -> None:
    prompt = PROMPT[:n_prompt]
    expected = engine.generate(prompt, method="ar", max_tokens=8).run().token_ids
    engine.cache.truncate(0)
    if n_cached:
        engine.generate(PROMPT[:n_cached], method="ar", max_tokens=1).run()
    cached = engine.cache.n_past
    text, reported = aborted(engine, 10, prompt)
    assert (text.finish_reason, text.token_ids, len(reported)) == ("cancelled", [], 10)
    kept = engine.cache.n_past
    # The batch was not finished. A recurrent state goes back to where it was saved.
    assert n_cached - 9 <= kept <= cached
    again = engine.generate(prompt, method="ar", max_tokens=8).run()
    assert again.token_ids == expected
    assert (again.stats.n_tokens, again.stats.n_reused) == (8, kept)


def test_progress_is_reported_within_a_batch_once_its_duration_is_known(engine: Engine) -> None:
    engine.generate(PROMPT, method="ar", max_tokens=1).run()
    engine.cache.truncate(0)
    reported: list[tuple[int, int]] = []
    engine.generate(
        PROMPT, method="ar", max_tokens=1, progress=lambda *parts: reported.append(parts)
    ).run()
    assert {total for _, total in reported} == {299}
    done = [part for part, _ in reported]
    assert done == sorted(done)
    assert len({part for part in done if 0 < part < 280}) > 20


def test_an_error_in_a_callback_leaves_the_engine_usable(engine: Engine) -> None:
    reported: list[int] = []

    def progress(done: int, total: int) -> None:
        reported.append(done)
        if len(reported) == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT, method="ar", max_tokens=8, progress=progress).run()
    assert len(reported) == 5
    assert engine.generate(PROMPT, method="ar", max_tokens=8).run().stats.n_tokens == 8


def test_an_aborted_decode_spoils_the_recurrent_states_of_all_texts(tmp_path: Path) -> None:
    path = write_hybrid_gguf(tmp_path / "model.gguf")
    with Model(path) as model, Context(model, replace(PARAMS, n_slots=2)) as context:
        expected = context.decode(text_rows([5, 6], 0, [False, True])).logits(1).copy()
        with pytest.raises(Cancelled):
            context.decode(Rows([7], [0], [range(1, 2)], [True]), lambda _: True)
        with pytest.raises(ContextError, match="state of a text was lost"):
            context.decode(text_rows([7], 2, [True]))
        with pytest.raises(CannotRewind):
            context.seq_rm(0, 2, -1)
        context.seq_rm(0, 0, -1)
        found = context.decode(text_rows([5, 6], 0, [False, True])).logits(1)
        assert abs(found - expected).max() < 1e-4


def test_ctrl_c_aborts_a_long_decode_at_once(engine: Engine) -> None:
    reported: list[int] = []

    def progress(done: int, total: int) -> None:
        reported.append(done)
        if len(reported) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01 * (len(reported) >= 5))  # the main thread handles it meanwhile

    text = engine.generate(PROMPT, method="ar", max_tokens=8, progress=progress)
    with pytest.raises(KeyboardInterrupt):
        text.run()
    engine.call(lambda: None)
    assert (text.finish_reason, text.token_ids) == ("cancelled", [])
    assert engine.generate(PROMPT, method="ar", max_tokens=8).run().stats.n_tokens == 8


@pytest.mark.parametrize(
    ("n_bytes", "n_rows", "expected"),
    [
        (15_000_000, 512, False),  # the bundled model's prompts: 60 ms
        (500_000_000, 16, False),
        (500_000_000, 64, True),
        (8_000_000_000, 1, False),  # a step
        (8_000_000_000, 2, True),
    ],
)
def test_only_long_decodes_are_watched(
    n_bytes: int, n_rows: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert (n_rows > DecodeWatch(n_bytes).max_unwatched) == expected
