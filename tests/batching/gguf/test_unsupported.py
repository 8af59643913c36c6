"""GGUFs that go on with no text: refused when they are loaded, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from batching.errors import UnsupportedModel
from batching.gguf import unsupported as kinds
from batching.gguf.unsupported import WRONG, why_no_text
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from speculation.engine import Engine
from tests.support.tiny_eagle3 import write_tiny_eagle3
from tests.support.tiny_gguf import write_tiny_gguf


def write_part(path: Path, architecture: str, kind: str | None = None) -> Path:
    """A GGUF of one tensor; ``kind`` is its general.type."""
    writer = GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_tensor("x", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "kind", "reason"),
    [
        ("llama", "adapter", "a LoRA adapter; merge it into its model with .*llama-export-lora"),
        ("clip", "mmproj", "what a model sees or hears with; give the model that it came with"),
        ("clip", None, "what a model sees or hears with; give the model that it came with"),
        ("imatrix", "imatrix", "an importance matrix for quantising; give the model"),
        ("controlvector", None, "a control vector; give the model"),
    ],
)
def test_a_file_that_goes_with_a_model_is_told_from_one(
    tmp_path: Path, architecture: str, kind: str | None, reason: str
) -> None:
    path = write_part(tmp_path / "part.gguf", architecture, kind)
    with pytest.raises(UnsupportedModel, match=f"part.gguf is no model but {reason}"):
        Model(path)


def test_a_vocabulary_without_weights_is_called_that(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="no model but a vocabulary without weights; choose"):
        Model(tmp_path / "vocab.gguf")


def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "mute.gguf", tokenizer="none")
    with pytest.raises(UnsupportedModel, match=r"\(llama .*\) has no vocabulary.*choose a chat"):
        Engine.load(path)


def test_a_model_that_writes_by_diffusion_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "diffusion.gguf", architecture="llada")
    with pytest.raises(UnsupportedModel, match=r"\(llada\) writes by diffusion.*choose a chat"):
        Model(path)


def test_a_model_that_attends_both_ways_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "e.gguf", more=lambda w: w.add_causal_attention(False))
    with pytest.raises(UnsupportedModel, match=r"\(llama\) is an embedding model.*choose a chat"):
        Model(path)


def test_a_model_for_which_llama_cpp_keeps_no_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds.C, "llama_model_is_diffusion", lambda _: False)
    path = write_tiny_gguf(tmp_path / "forgets.gguf", architecture="llada")
    with Model(path) as model, pytest.raises(UnsupportedModel, match="keeps nothing of what it"):
        Context(model, ContextParams())


def test_a_model_with_an_encoder_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds.C, "llama_model_has_encoder", lambda _: True)
    with pytest.raises(UnsupportedModel, match=r"\(llama\) has an encoder, as translators"):
        Model(tiny_model)


def test_a_head_that_shares_a_context_is_no_model_by_itself(tmp_path: Path) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf")
    with Model(path) as model, pytest.raises(UnsupportedModel, match="drafts for the model that"):
        Context(model, ContextParams())


@pytest.mark.parametrize("architecture", WRONG)
def test_architectures_that_llama_cpp_computes_wrong_are_refused(architecture: str) -> None:
    found = why_no_text(None, {"general.architecture": architecture}.get)
    assert found == f"({architecture}) is of an architecture that llama.cpp computes wrong"
