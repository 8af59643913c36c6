"""GGUF files that are not text-generation models are refused with the reason."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from batching.errors import ModelError, UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.gguf.unsupported import check_model_file
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.private_api import BROKEN_GRAPHS, not_a_text_model
from speculation.engine import Engine
from tests.support.paths import ROOT
from tests.support.tiny_gguf import finish_writer, write_tiny_gguf
from tests.support.tiny_heads import write_tiny_eagle3


def write_part(path: Path, architecture: str, kind: str | None = None, *, n: int = 1) -> Path:
    """A GGUF of ``n`` tensors; ``kind`` is its general.type."""
    writer = GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    for i in range(n):
        writer.add_tensor(f"x{i}", np.zeros((64, 64), np.float32))
    return finish_writer(writer, path)


@pytest.mark.parametrize(
    ("architecture", "kind", "reason"),
    [
        ("llama", "adapter", "a LoRA adapter; merge it into its model with .*llama-export-lora"),
        ("clip", "mmproj", "an image or audio encoder; load the model it belongs to"),
        ("clip", None, "an image or audio encoder; load the model it belongs to"),
        ("imatrix", "imatrix", "an importance matrix for quantising; load the model"),
        ("controlvector", None, "a control vector; load the model"),
    ],
)
def test_a_file_that_belongs_to_a_model_is_not_loaded_as_one(
    tmp_path: Path, architecture: str, kind: str | None, reason: str
) -> None:
    path = write_part(tmp_path / "part.gguf", architecture, kind)
    with pytest.raises(UnsupportedModel, match=f"part.gguf is not a model but {reason}"):
        Model(path)
    path = write_part(tmp_path / "vocab.gguf", "llama", n=0)
    with pytest.raises(UnsupportedModel, match="but a vocabulary without weights; choose"):
        Model(path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tokenizer": "none"}, r"\(llama .*\) has no vocabulary.*choose a chat"),
        ({"architecture": "llada"}, r"\(llada\) generates text by diff.*choose a chat"),
        ({"more": lambda writer: writer.add_causal_attention(False)},
         r"\(llama\) is an embedding model.*choose a chat"),
    ],
)  # fmt: skip
def test_a_model_that_continues_no_text_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        Engine.load(path)


def test_models_without_a_cache_or_with_an_encoder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_model_is_diffusion", lambda _: False)
    path = write_tiny_gguf(tmp_path / "forgets.gguf", architecture="llada")
    with Model(path) as model, pytest.raises(UnsupportedModel, match="keeps no KV cache"):
        Context(model, ContextParams())
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_model_has_encoder", lambda _: True)
    with pytest.raises(UnsupportedModel, match=r"\(llama\) has an encoder, like translation"):
        Model(tiny_model)
    path = write_tiny_eagle3(tmp_path / "head.gguf")
    with Model(path) as model, pytest.raises(UnsupportedModel, match="contains drafting heads"):
        Context(model, ContextParams())


@pytest.mark.parametrize("architecture", BROKEN_GRAPHS)
def test_architectures_that_llama_cpp_computes_incorrectly_are_refused(architecture: str) -> None:
    found = not_a_text_model(None, architecture, causal=True)
    assert found == f"({architecture}) has an architecture that llama.cpp computes incorrectly"


def rewritten(path: Path, **values: Any) -> Path:
    """A tiny model with changed metadata."""

    def change(writer: GGUFWriter) -> None:
        for key, value in values.items():
            name = key.replace("__", ".")
            for part in writer.kv_data:
                part.pop(name, None)
            if key == "general__alignment":
                writer.add_custom_alignment(value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)

    return write_tiny_gguf(path, last=change)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"llama__block_count": 0}, "llama.block_count is 0, outside 1 to 512"),
        ({"llama__block_count": 513}, "llama.block_count is 513, outside 1 to 512"),
        ({"llama__nextn_predict_layers": 3}, "nextn_predict_layers is 3, outside 0 to 2"),
        ({"llama__expert_count": 1}, "llama.expert_used_count is 0, outside 1 to 1"),
        ({"llama__expert_count": 1025}, "llama.expert_count is 1025, outside 0 to 1024"),
        ({"llama__expert_used_count": 2}, "llama.expert_used_count is 2, outside 0 to 0"),
        ({"llama__expert_group_count": 3}, "llama.expert_group_count is 3, outside 0 to 0"),
        ({"llama__attention__layer_norm_rms_epsilon": math.nan}, "rms_epsilon is nan"),
        ({"llama__attention__layer_norm_rms_epsilon": -1.0}, r"rms_epsilon is -1\.0"),
        ({"llama__attention__layer_norm_rms_epsilon": math.inf}, "rms_epsilon is inf"),
        ({"llama__rope__freq_base": math.nan}, "llama.rope.freq_base is nan"),
        ({"llama__rope__scaling__type": "x"}, "type is 'x', not one of none, linear, yarn, long"),
        ({"tokenizer__ggml__model": "bert"}, "model is 'bert', but 256 of the tokens are byte"),
        ({"llama__attention__head_count_kv": [4, 2]}, r"kv is \[4, 2\], but layers of llama have"),
        ({"llama__attention__head_count": [4, 8]}, r"count is \[4, 8\], but layers of llama have"),
        ({"llama__attention__head_count_kv": 3}, "head_count is 4, not a multiple of .*kv.*is 3"),
        ({"general__alignment": 1}, "starts at byte .*multiple of 32; general.alignment is 1"),
        ({"general__architecture": "smallthinker"}, "smallthinker.expert_count is 0, outside 1 to"),
        ({"general__architecture": "glm4moe", "glm4moe__expert_count": 0},
         "glm4moe.expert_count is 0, outside 1 to 1024"),
        ({"general__architecture": "qwen35", "qwen35__full_attention_interval": 0},
         "qwen35.full_attention_interval is 0"),
        ({"general__architecture": "mamba2", "mamba2__ssm__group_count": 0},
         "mamba2.ssm.group_count is 0"),
    ],
)  # fmt: skip
def test_metadata_that_would_crash_llama_cpp_is_refused_before_loading(
    tmp_path: Path, values: dict[str, object], reason: str
) -> None:
    path = rewritten(tmp_path / "m.gguf", **values)
    with pytest.raises(UnsupportedModel, match=f"cannot run .*m.gguf: .*{reason}.*download it"):
        check_model_file(path)


@pytest.mark.parametrize("alignment", [0, 24])
def test_an_alignment_must_be_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(rewritten(path, general__alignment=32).read_bytes())
    struct.pack_into("<I", data, data.index(b"general.alignment") + 21, alignment)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"general.alignment is {alignment}, not a power of two"):
        Model(path)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("blk.0.attn_q.weight", np.int32, "has type I32, which is not valid for weights"),
        ("token_embd.weight", np.int8, "has type I8, which is not valid for weights"),
        ("output.weight", np.float64, "has type F64, which is not valid for weights"),
        ("blk.1.ffn_norm.weight", np.float16, "has type F16, but norms must be F32"),
    ],
)
def test_weights_of_an_unsupported_type_are_refused(
    tiny_model: Path, tmp_path: Path, name: str, kind: type[np.floating[Any]], reason: str
) -> None:
    weights = GGUFFile(tiny_model).tensor(name).astype(kind)
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors={name: weights})
    with pytest.raises(UnsupportedModel, match=f"tensor {name} {reason}"):
        Model(path)


def test_odd_tokens_and_templates_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace("▁cat".encode(), "▁dog".encode()))
    with pytest.raises(UnsupportedModel, match="its vocabulary has the token '▁dog' twice"):
        Model(path)
    for old, new, reason in (
        ("▁dog", b"\xe2\x96\x81a\0t", r"'▁a\\x00t', which has a NUL byte, beside '▁a'"),
        ("▁saw", b"\xe2\x96\x81\0aw", r"'▁\\x00aw', which has a NUL byte, beside '▁'"),
    ):
        path = write_tiny_gguf(tmp_path / "m.gguf")
        path.write_bytes(path.read_bytes().replace(old.encode(), new))
        with pytest.raises(UnsupportedModel, match=f"its vocabulary has the token {reason}"):
            Model(path)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"{{ bos_token }}", b"{{ \xffos_token }}"))
    why = "tokenizer.chat_template is not UTF-8 text .invalid start byte at byte 3"
    with pytest.raises(UnsupportedModel, match=why):
        Model(path)


@pytest.mark.parametrize(
    "values",
    [
        {"llama__attention__layer_norm_rms_epsilon": 0.0},
        {"llama__rope__scaling__type": "yarn"},
        {"llama__expert_count": 0, "llama__expert_used_count": 0},
        {"general__alignment": 64},
        {"llama__ssm__group_count": 0},  # as files of plamo2 have it
        {"llama__attention__head_count_kv": [4, 4]},
        {"llama__attention__layer_norm_epsilon": 1e-6, "llama__nextn_predict_layers": 0},
    ],
)
def test_unusual_metadata_is_accepted(tmp_path: Path, values: dict[str, object]) -> None:
    with Model(rewritten(tmp_path / "m.gguf", **values)) as model:
        assert model.n_layer == 2


def test_a_dense_model_may_declare_one_expert(tmp_path: Path) -> None:
    """Hunyuan's do; llama.cpp takes it as none."""
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        architecture="hunyuan-dense",
        last=lambda writer: writer.add_uint32("hunyuan-dense.expert_count", 1),
    )
    assert check_model_file(path)


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.gguf")), ids=lambda p: p.stem)
def test_the_bundled_models_and_heads_are_accepted(path: Path) -> None:
    assert check_model_file(path)
