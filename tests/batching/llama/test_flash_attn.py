"""When flash attention is on: as requested, or as measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batching.llama.context import Context, ContextParams, choose_flash_attn
from batching.tree import NO_LIMIT
from speculation.engine import Engine
from tests.support.tiny_gguf import write_recurrent_gguf


class Opened:
    """A stand-in for the context made for measuring."""

    def __init__(self, model: object, params: ContextParams) -> None:
        self.flash_attn = params.flash_attn

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def model(n_host_layers: int) -> Any:
    return SimpleNamespace(
        n_bytes=8_000_000,
        n_positions=NO_LIMIT,
        n_layer=2,
        n_host_layers=n_host_layers,
        architecture="llama",
        n_ctx_train=512,
        metadata={}.get,
    )


@pytest.mark.parametrize(
    ("on_takes", "chosen"), [(0.8, "on"), (1.0, "on"), (1.09, "on"), (1.11, "off"), (2.0, "off")]
)
def test_flash_attention_is_turned_off_only_if_that_is_clearly_faster(
    on_takes: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def log_ratio(on: Opened, off: Opened, weights: dict[int, float], *_: float) -> float:
        measured.append((on.flash_attn, off.flash_attn, weights))
        return math.log(on_takes)

    monkeypatch.setattr("batching.llama.context.Context", Opened)
    monkeypatch.setattr("batching.llama.context.log_ratio", log_ratio)
    assert choose_flash_attn(model(n_host_layers=2), ContextParams()) == chosen
    assert choose_flash_attn(model(n_host_layers=2), ContextParams(), rows=120) == chosen
    assert measured == [("on", "off", {1: 0.5, 4: 0.25, 16: 0.25}), ("on", "off", {120: 1.0})]


def test_a_method_of_many_rows_gets_the_setting_that_is_faster_for_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log_ratio(on: Context, off: Context, weights: dict[int, float], *_: float) -> float:
        return -1.0 if max(weights) > 64 else 1.0

    monkeypatch.setattr("batching.llama.context.log_ratio", log_ratio)
    with Engine.load(tiny_model, ContextParams(n_ctx=512)) as engine:
        seen = []
        for method in ("ar", "lookahead", "prompt-lookup", "lookahead:window=3,ngram=3,guesses=3"):
            engine.generate("the cat", method=method, max_tokens=4).run()
            seen.append(engine.context.flash_attn)
    assert seen == [False, True, False, False]
    with Engine.load(tiny_model, ContextParams(n_ctx=512, flash_attn="off")) as engine:
        engine.generate("the cat", method="lookahead", max_tokens=4).run()
        assert engine.context.flash_attn is False


def test_flash_attention_is_not_measured_if_there_is_no_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batching.llama.context.Context", None)  # opening one would fail
    on_cpu, on_gpu = model(n_host_layers=2), model(n_host_layers=0)
    assert choose_flash_attn(on_cpu, ContextParams(flash_attn="on")) == "on"
    assert choose_flash_attn(on_cpu, ContextParams(flash_attn="off")) == "off"
    assert (
        choose_flash_attn(on_cpu, ContextParams(kv_type="q8_0")) == "on"
    )  # a quantised cache needs it
    assert choose_flash_attn(on_gpu, ContextParams()) == "auto"  # llama.cpp decides


def test_flash_attention_is_also_measured_with_a_recurrent_model(tmp_path: Path) -> None:
    path = write_recurrent_gguf(tmp_path / "recurrent.gguf")
    with Engine.load(path, ContextParams(n_ctx=256)) as engine:
        assert engine.context.n_seq_max == 1  # 64 recurrent states would take gigabytes
        assert engine.generate("the cat", max_tokens=4).run().stats.n_tokens == 4
