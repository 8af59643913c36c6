"""What is chosen by the machine."""

from __future__ import annotations

import os

import pytest

from batching.errors import InvalidParameter
from batching.llama.hardware import choose_cuda_graphs


@pytest.mark.parametrize(
    ("wanted", "n_bytes", "disabled"),
    [
        ("", 144_000_000, None),
        ("", 1_900_000_000, "1"),
        ("on", 1_900_000_000, None),
        ("off", 144_000_000, "1"),
    ],
)
def test_cuda_graphs_are_off_for_a_large_model_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, wanted: str, n_bytes: int, disabled: str | None
) -> None:
    monkeypatch.setenv("SPECULATION_CUDA_GRAPHS", wanted)
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "")  # so that it is restored
    monkeypatch.delenv("GGML_CUDA_DISABLE_GRAPHS")
    choose_cuda_graphs(n_bytes)
    assert os.environ.get("GGML_CUDA_DISABLE_GRAPHS") == disabled
    monkeypatch.setenv("SPECULATION_CUDA_GRAPHS", "yes")
    with pytest.raises(InvalidParameter, match="'yes'; set it to on or off"):
        choose_cuda_graphs(n_bytes)
