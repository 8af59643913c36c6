"""The sampling that a model's authors recommend."""

from __future__ import annotations

import pytest

from speculation.recommended import recommended

QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def nothing(key: str) -> None:
    return None


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("qwen3-0.6b", QWEN3),
        ("qwen3-4b-instruct-2507", {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ("hf:bartowski/x/Qwen_Qwen3-14B-Q4_K_M.gguf", QWEN3),
        ("/models/TinyLlama-1.1B.gguf", {}),
        ("qwen3.5-4b", {}),
        ("bundled", {}),
    ],
)
def test_models_txt_has_it_for_a_model_or_its_family(model: str, found: dict[str, float]) -> None:
    assert recommended(model, nothing) == found


def test_what_the_file_says_counts_unless_it_cannot_be_used() -> None:
    own = {"general.sampling.temp": "0.300000", "general.sampling.penalty_repeat": "1.1"}
    assert recommended("qwen3-0.6b", own.get) == {"temperature": 0.3, "repeat_penalty": 1.1}
    for odd in ("-1", "nan", "x"):
        assert recommended("qwen3-0.6b", {"general.sampling.temp": odd}.get) == QWEN3
