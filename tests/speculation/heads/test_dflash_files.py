"""DFlash head files: which are refused, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import (
    HeadsError,
    InvalidParameter,
    ModelError,
    UnsupportedModel,
)
from batching.llama import private_api
from batching.llama.model import Model
from batching.tree import Floats
from speculation.engine import Engine
from tests.support.exact import EXACT, PROMPT
from tests.support.head_checks import load_heads
from tests.support.tiny_dflash import DFLASH2, N_TINY, dflash2, dspark, write_tiny_dflash
from tests.support.tiny_gguf import write_tiny_gguf


def matrix(*shape: int) -> Floats:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, of which heads read the inputs of the last three."""
    return write_tiny_gguf(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


def test_a_head_is_not_a_model_and_must_be_given_with_heads(tmp_path: Path, target: Path) -> None:
    own = {"token_embd.weight": matrix(N_TINY, 32), "output.weight": matrix(N_TINY, 32)}
    for tensors in ({}, own):
        path = write_tiny_dflash(tmp_path / "head.gguf", tensors=tensors)
        with pytest.raises(HeadsError, match=r"head\.gguf contains drafting heads, not a model"):
            Engine.load(path, EXACT)
        with pytest.raises(HeadsError, match=r"head\.gguf contains drafting heads, not a model"):
            Engine.load(target, EXACT, draft_model=path)
    none = "needs dflash heads; load them with heads"
    with Engine.load(target, EXACT) as engine, pytest.raises(InvalidParameter, match=none):
        engine.generate(PROMPT, method="dflash").run()


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"n_embd": 64}, "hidden states 64 wide, but those of 'tiny' are 32 wide; use the head"),
        ({"layers": (1, 2, 4)}, r"inputs of layers \[1, 2, 4\], but 'tiny' has layers 0 to 3"),
        ({"metadata": {"dflash.target_layers": None}}, "lists None as the layers it reads"),
        ({"metadata": {"split.count": 2}}, "is one of 2 files; join them"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": None}}, "has the mask token None"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": N_TINY}}, f"has the mask token {N_TINY}"),
        ({"block_size": 1}, "has blocks of 1 tokens"),
        (
            {"tensors": dspark(), "metadata": {"dflash.block_size": None}},
            "has blocks of None tokens",
        ),
        ({"metadata": {"dflash.attention.value_length": 4}}, "keys 8 wide and values 4 wide"),
        (
            {"tensors": {"output.weight": matrix(9, 32)}},
            f"has 9 logits and no d2t to map them to the {N_TINY} tokens",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_before_llama_cpp_loads_them(
    tmp_path: Path, target: Path, head: dict[str, Any], reason: str
) -> None:
    path = write_tiny_dflash(tmp_path / "head.gguf", **head)
    with Model(target) as model, pytest.raises(HeadsError, match=reason) as refused:
        load_heads([path], model)
    assert "head.gguf" in str(refused.value)


def test_a_tensor_that_llama_cpp_does_not_know_is_reported(tmp_path: Path, target: Path) -> None:
    tensors = {"blk.0.attn_q.bias": matrix(32)}
    path = write_tiny_dflash(tmp_path / "head.gguf", tensors=tensors)
    with Model(target) as model, pytest.raises(ModelError, match=r"head\.gguf"):
        load_heads([path], model)


def test_missing_library_functions_are_reported(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_dflash(tmp_path / "head.gguf", tensors=dflash2(), metadata=DFLASH2)
    name = "llama_set_embeddings_nextn"
    with monkeypatch.context() as patch:
        patch.setitem(private_api.FUNCTIONS, name, None)
        with pytest.raises(UnsupportedModel, match=f"does not export {name}"):
            Engine.load(target, EXACT, heads=path)
