"""The fastest settings of a model: what is tried, what counts as faster, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batching.llama import tune
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.timing import decode_seconds
from batching.llama.tune import Settings, fastest
from batching.watched import GivenUp, until
from speculation.engine import Engine
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_recurrent_gguf

OPEN = ContextParams(n_ctx=256)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "physical_cores", lambda: 2)


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What each setting does to the time of a decode, in which others interfere at times."""
    factors = {"without flash attention": 1.0, "one thread": 1.0, "not repacked": 1.0}
    decode, n = decode_seconds, 0

    def timed(context: Context, n_rows: int, n_past: int) -> float:
        nonlocal n
        n += 1
        decode(context, n_rows, n_past)
        seconds = 0.001 * n_rows * (20.0 if n % 7 == 0 else 1.0)
        if not context.flash_attn:
            seconds *= factors["without flash attention"]
        if context.n_threads == 1:
            seconds *= factors["one thread"]
        if not context.model.is_repacked:
            seconds *= factors["not repacked"]
        return seconds

    monkeypatch.setattr(tune, "decode_seconds", timed)
    return factors


@pytest.fixture
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


@pytest.mark.parametrize(
    ("slower", "found"),
    [
        ({}, Settings()),
        ({"without flash attention": 0.97, "not repacked": 0.97, "one thread": 0.97}, Settings()),
        ({"without flash attention": 0.9}, Settings(flash_attn=False)),
        ({"not repacked": 0.8, "one thread": 1.5}, Settings(repack=False)),
        ({"not repacked": 0.5, "one thread": 0.9}, Settings(repack=False, n_threads=1)),
    ],
)
def test_what_is_clearly_faster_is_chosen(
    slower: dict[str, float], found: Settings, takes: dict[str, float], model: Model
) -> None:
    takes.update(slower)
    assert fastest(model, OPEN, Settings()) == found


def test_what_is_given_is_not_tried(takes: dict[str, float], model: Model) -> None:
    takes.update(dict.fromkeys(takes, 0.5))
    given = replace(OPEN, flash_attn="on", n_threads=2)
    assert fastest(model, given, Settings()) == Settings(repack=False)
    for_two = fastest(model, replace(OPEN, n_slots=2), Settings())
    assert for_two == Settings(repack=False, n_threads=1)
    for params in (replace(OPEN, n_slots=2), replace(OPEN, kv_type="q8_0")):  # they need it
        assert Settings(flash_attn=False).fill(params).flash_attn == "auto"


def test_a_copy_must_leave_room_and_a_request_ends_the_trials(
    takes: dict[str, float], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes.update({"not repacked": 0.5})
    monkeypatch.setattr(tune, "available_memory", lambda: 2**30)
    assert fastest(model, OPEN, Settings()) == Settings()
    with until(lambda: True), pytest.raises(GivenUp):
        fastest(model, OPEN, Settings())


def test_a_recurrent_model_is_measured_anew(takes: dict[str, float], tmp_path: Path) -> None:
    takes.update({"not repacked": 0.5})
    with Model(write_recurrent_gguf(tmp_path / "recurrent.gguf")) as model:
        assert fastest(model, OPEN, Settings()) == Settings(repack=False)


def test_the_next_load_takes_what_an_idle_engine_found_unless_a_flag_says_otherwise(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECULATION_CACHE", str(tmp_path))
    monkeypatch.setattr("speculation.driver._IDLE_SECONDS", 600.0)
    found = Settings(repack=False, flash_attn=False, n_threads=1)
    tried: list[ContextParams] = []

    def measured(_: Model, params: ContextParams, used: Settings) -> Settings:
        tried.append(params)
        return found

    monkeypatch.setattr("speculation.runtime.fastest", measured)
    seen = []
    for params in (OPEN, OPEN, replace(OPEN, flash_attn="on"), replace(OPEN, n_threads=2), EXACT):
        with Engine.load(tiny_model, params) as engine:
            context = engine.context
            seen.append((context.model.is_repacked, context.flash_attn, context.n_threads))
            engine._driver.call(engine._runtime.rest)
    assert seen[1:3] == [(False, False, 1), (True, True, seen[0][2])]
    assert len(tried) == 4  # the second load has what the first found
