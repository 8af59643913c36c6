"""The GGUF reader: tensor types and damaged files."""

from __future__ import annotations

import ctypes
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from batching.errors import ModelError, UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.gguf.types import BF16, REMOVED, TYPES
from batching.llama.library import exported
from batching.llama.model import Model
from batching.llama.weights import Weights, traits
from tests.support.tiny_gguf import finish_writer, write_tiny_gguf


def with_type(source: Path, path: Path, name: str, kind: int) -> Path:
    """A copy with the type of one tensor changed."""
    data = bytearray(source.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (n_axes,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * n_axes, kind)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, "which this build .* does not support; install a newer") for kind in (45, 47, 52)),
        (2**32 - 1, "which this build of llama.cpp does not support"),
        *((kind, "which llama.cpp no longer supports; choose another quant") for kind in (31, 36)),
    ],
)
def test_an_unsupported_tensor_type_is_named_and_a_fix_suggested(
    tiny_model: Path, tmp_path: Path, kind: int, reason: str
) -> None:
    name = "blk.1.attn_q.weight"
    path = with_type(tiny_model, tmp_path / "new.gguf", name, kind)
    with pytest.raises(UnsupportedModel, match=f"{name} has type {kind}, {reason}"):
        Model(path)
    file = Weights(path)
    assert file.tensor("output.weight").shape == (305, 32)
    with pytest.raises(UnsupportedModel, match=f"{name} has type {kind}, {reason}"):
        file.tensor(name)


def test_tensor_types_match_the_installed_ggml() -> None:
    name_of = exported("ggml_type_name")
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    for kind, known in TYPES.items():
        there = traits(kind)
        assert (there.block, there.block_bytes) == (known.n_values, known.n_bytes), known
        assert name_of(kind).decode().upper() == known.name
    assert {kind for kind in range(max(TYPES)) if not traits(kind).block} == set(REMOVED)
    assert set(TYPES).isdisjoint(REMOVED)


def test_a_tensor_of_any_type_is_read_as_float32(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "x")
    blocks = np.frombuffer(struct.pack("<e32b", 0.5, *range(-16, 16)), np.uint8)
    writer.add_tensor("q8_0", np.stack([blocks, blocks]), raw_dtype=8)  # type: ignore[arg-type]
    upper = (np.array([[1.5, -2.0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor("bf16", upper.view(np.uint8), raw_dtype=BF16)  # type: ignore[arg-type]
    finish_writer(writer, tmp_path / "x.gguf")
    file = Weights(tmp_path / "x.gguf")
    assert file.tensor("bf16").tolist() == [[1.5, -2.0]]
    assert file.tensor("q8_0").tolist() == [[0.5 * i for i in range(-16, 16)]] * 2
    assert file.rows("q8_0", [1]).tolist() == [[0.5 * i for i in range(-16, 16)]]
    with pytest.raises(UnsupportedModel, match="q8_0 has type Q8_0 but must be F32, F16 or"):
        GGUFFile(tmp_path / "x.gguf").tensor("q8_0")


def damaged(data: bytes, rng: random.Random, n_header: int) -> bytes:
    """The file with one to four random changes in its header."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(4, n_header)
        how = rng.randrange(5)
        if how == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            found[at] = rng.choice((0, 1, 8, 9, 13, 127, 255))
        elif how == 2:
            values: tuple[int, ...] = 0, 1, 9, 31, 36, 45, 2**31, 2**32 - 1
            struct.pack_into("<I", found, at, rng.choice(values))
        elif how == 3:
            values = 0, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1
            struct.pack_into("<Q", found, at, rng.choice(values))
        else:
            del found[at : at + rng.randint(1, 16)]
    return bytes(found[: rng.randrange(len(found))] if rng.randrange(20) == 0 else found)


def test_a_damaged_header_raises_only_model_errors(tmp_path: Path) -> None:
    """Every file is read to its last tensor."""
    whole = write_tiny_gguf(tmp_path / "whole.gguf", n_layer=1, n_embd=32)
    data = whole.read_bytes()
    first = min(tensor.offset for tensor in GGUFFile(whole).tensors.values())
    rng = random.Random(22)
    refused = 0
    for i in range(600):
        path = tmp_path / f"{i % 2}.gguf"
        path.write_bytes(damaged(data, rng, first))
        try:
            file = Weights(path)
            file.texts("tokenizer.ggml.tokens")
            for name in file.tensors:
                file.tensor(name)
        except ModelError:
            refused += 1
    assert 100 < refused < 600
    header = struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1s", 1, b"x")
    axes = struct.pack("<IQQIQ", 2, 0, 2**62, 0, 0)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + header + axes + bytes(64))
    with pytest.raises(ModelError, match="tensor 'x' has the size"):
        GGUFFile(tmp_path / "x.gguf")
