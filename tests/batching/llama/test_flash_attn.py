"""When flash attention is on: as requested, or as measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batching.llama.context import ContextParams, choose_flash_attn
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
        n_bytes=8_000_000, n_positions=NO_LIMIT, n_layer=2, n_host_layers=n_host_layers
    )


@pytest.mark.parametrize(
    ("on_takes", "chosen"), [(0.8, "on"), (1.0, "on"), (1.04, "on"), (1.06, "off"), (2.0, "off")]
)
def test_flash_attention_is_turned_off_only_if_that_is_clearly_faster(
    on_takes: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def log_ratio(on: Opened, off: Opened, n_past: int, budget_seconds: float) -> float:
        measured.append((on.flash_attn, off.flash_attn))
        return math.log(on_takes)

    monkeypatch.setattr("batching.llama.context.Context", Opened)
    monkeypatch.setattr("batching.llama.context.log_ratio", log_ratio)
    assert choose_flash_attn(model(n_host_layers=2), ContextParams()) == chosen
    assert measured == [("on", "off")]


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
