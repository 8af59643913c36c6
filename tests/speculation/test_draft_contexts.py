"""Contexts of draft models and heads: what fills them, or asks for them, ends no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculation import runtime as runtime_module
from speculation.engine import Engine
from tests.support.exact import EXACT, endless
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_heads import blocks, mtp, states

PROMPTS = [[first + i % 20 for i in range(140)] for first in (5, 30)]
Kind = Callable[[Path], tuple[Path, list[Path], list[str]]]


def plain_and(engine: Engine, method: str) -> tuple[list[list[int]], list[Any]]:
    """The tokens of plain decoding, and the texts of ``method`` written at the same time."""
    settings: dict[str, Any] = {"max_tokens": 40, "sampling": endless(engine)}
    plain = [engine.generate(prompt, method="ar", **settings).run() for prompt in PROMPTS]
    texts = [engine.submit(prompt, method=method, **settings) for prompt in PROMPTS]
    return [text.token_ids for text in plain], [text.run() for text in texts]


def test_of_texts_too_long_together_one_drafts_on(tiny_model: Path, tmp_path: Path) -> None:
    twin = write_tiny_gguf(tmp_path / "twin.gguf", n_ctx=128)
    with Engine.load(tiny_model, EXACT, draft_model=twin, parallel=2) as engine:
        assert engine.draft is not None
        assert engine.draft.n_ctx == 256
        plain, texts = plain_and(engine, "draft:p_min=0,p_path=0")
        assert [text.token_ids for text in texts] == plain
        full, drafted = sorted([text.stats.n_accepted for text in texts])
        assert full < 15
        assert drafted > 30
        again = engine.generate([9] * 200, method="draft:p_min=0,p_path=0", max_tokens=30)
        assert again.run().stats.n_accepted > 20  # the idle texts have left its context


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (states, "eagle-2:window=1000"),
        (blocks, "dflash:window=1000"),
        (mtp, "mtp:window=1000,p_min=0"),
    ],
)
def test_prompts_too_long_for_a_heads_context_together_end_no_text(
    kind: Kind, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params_of = runtime_module._head_params
    small = lambda context: replace(params_of(context), n_ctx=256)  # noqa: E731
    monkeypatch.setattr(runtime_module, "_head_params", small)
    model, heads, _ = kind(tmp_path)
    with Engine.load(model, EXACT, heads=heads, parallel=2) as engine:
        plain, texts = plain_and(engine, method)
        assert [text.token_ids for text in texts] == plain
        assert all(text.stats.n_drafted > 20 for text in texts)


@pytest.mark.parametrize("kind", [states, mtp])
def test_asking_which_methods_run_changes_no_text(kind: Kind, tmp_path: Path) -> None:
    model, heads, methods = kind(tmp_path)
    with Engine.load(model, EXACT, heads=heads, draft_model=model) as engine:
        settings: dict[str, Any] = {"max_tokens": 30, "sampling": endless(engine)}
        plain = engine.generate(PROMPTS[0], method="ar", **settings).run().token_ids
        for method in ["draft:width=4,p_min=0", "suffix", *methods]:
            text = engine.generate(PROMPTS[0], method=method, **settings)
            next(text)
            assert "ar" not in engine.unavailable()
            assert text.run().token_ids == plain, method
