"""The bundled heads: all kinds, for the bundled model, small, and accepted often enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batching.errors import ModelError
from batching.llama.context import ContextParams
from speculation.bench.__main__ import main
from speculation.chat.template import chat_prompt
from speculation.engine import Engine
from speculation.registry import paired_heads, resolve
from speculation.system.console import worded
from tests.bundled.test_draft import QUESTIONS


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("bundled", ContextParams(n_threads=1), heads="paired") as engine:
        yield engine


def test_the_heads_of_all_kinds_fit_in_eight_megabytes_and_have_model_cards(engine: Engine) -> None:
    assert set(engine.resources.seat.heads) == {"medusa", "redrafter", "eagle", "eagle-3"}
    files = [resolve(name) for name in paired_heads("bundled")]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    for file in files:
        card = file.with_suffix(".md").read_text(encoding="utf-8")
        assert file.name in card
        assert f"{file.stat().st_size:,} bytes" in card


@pytest.mark.parametrize("heads", ["bundled-medusa", "bundled-eagle", "bundled-eagle3"])
def test_heads_given_as_a_model_are_refused_with_the_right_flag(
    heads: str, tiny_model: Path
) -> None:
    reason = (
        f"{resolve(heads)} contains drafting heads, not a model; give it with --heads, and the "
        f"model it was trained for with --model"
    )
    for model, draft_model in ((heads, None), (tiny_model, heads)):
        with pytest.raises(ModelError) as refused:
            Engine.load(model, ContextParams(n_threads=1), draft_model=draft_model)
        assert worded(refused.value) == reason


def test_the_benchmark_finds_the_heads_paired_with_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    flags = "--methods medusa --categories chat --limit 1 --n-predict 8 --threads 1"
    command = ["--model", "bundled", "--heads", *flags.split(), "--json", str(file)]
    assert main(command) == 0
    assert "medusa" in capsys.readouterr().out
    heads = json.loads(file.read_text(encoding="utf-8"))["settings"]["heads"]
    assert [name.split()[0] for name in heads] == [
        resolve(name).name for name in paired_heads("bundled")
    ]


# Half of the extra tokens per step that each head gave when it was trained.
@pytest.mark.parametrize(
    ("method", "least"),
    [("medusa", 1.3), ("redrafter", 1.4), ("eagle-1", 1.8), ("eagle-2", 1.9), ("eagle-3", 1.5)],
)
def test_heads_draft_many_of_the_models_tokens(engine: Engine, method: str, least: float) -> None:
    n_tokens = n_steps = 0
    for question in QUESTIONS:
        prompt = chat_prompt(engine.model, [{"role": "user", "content": question}]).tokens
        stats = engine.generate(prompt, method=method, max_tokens=40).run().stats
        n_tokens += stats.n_tokens
        n_steps += stats.n_steps
    assert n_tokens / n_steps > least
