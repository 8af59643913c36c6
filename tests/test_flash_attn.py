"""When flash attention is on: as asked, or as it was measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batching.context import ContextParams, choose_flash_attn
from batching.tree import NO_LIMIT
from speculation.engine import Engine
from tests.tiny_gguf import write_recurrent_gguf


class Opened:
    """Stands for a context that is made to measure."""

    def __init__(self, model: object, params: ContextParams) -> None:
        self.flash_attn = params.flash_attn

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("on_takes", "chosen"), [(0.8, True), (1.0, True), (1.04, True), (1.06, False), (2.0, False)]
)
def test_flash_attention_is_off_only_where_that_is_clearly_faster(
    on_takes: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def log_ratio(on: Opened, off: Opened, n_past: int, budget_seconds: float) -> float:
        measured.append((on.flash_attn, off.flash_attn))
        return math.log(on_takes)

    monkeypatch.setattr("batching.context.supports_gpu", lambda: False)
    monkeypatch.setattr("batching.context.Context", Opened)
    monkeypatch.setattr("batching.context.log_ratio", log_ratio)
    model: Any = SimpleNamespace(n_bytes=8_000_000, n_positions=NO_LIMIT)
    assert choose_flash_attn(model, ContextParams()) is chosen
    assert measured == [("on", "off")]


def test_flash_attention_is_not_measured_where_there_is_nothing_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = SimpleNamespace(n_bytes=8_000_000, n_positions=NO_LIMIT)
    monkeypatch.setattr("batching.context.Context", None)  # making one would fail
    monkeypatch.setattr("batching.context.supports_gpu", lambda: False)
    assert choose_flash_attn(model, ContextParams(flash_attn="on"))
    assert not choose_flash_attn(model, ContextParams(flash_attn="off"))
    assert choose_flash_attn(model, ContextParams(kv_type="q8_0"))  # a quantised cache needs it
    monkeypatch.setattr("batching.context.supports_gpu", lambda: True)
    assert choose_flash_attn(model, ContextParams())


def test_it_is_measured_with_a_model_that_cannot_drop_rows_too(tmp_path: Path) -> None:
    path = write_recurrent_gguf(tmp_path / "recurrent.gguf")
    with Engine.load(path, ContextParams(n_ctx=256)) as engine:
        assert engine.context.n_seq_max == 1  # a state for each of 64 would be gigabytes
        assert engine.generate("the cat", max_tokens=4).run().stats.n_tokens == 4
