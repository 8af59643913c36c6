"""The GGUF writer, compared with the ``gguf`` package."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batching.errors import SpeculationError
from batching.gguf.reader import GGUFFile
from batching.gguf.writer import NewTensor, TensorType, Value, write_gguf
from batching.llama.weights import encoded_tensor
from tests.support.tiny_gguf import finish_writer

METADATA: dict[str, Value] = {
    "general.architecture": "some",
    "general.name": "ä name",
    "some.flag": True,
    "some.count": 3_000_000_000,
    "some.rate": 0.1,
    "some.places": [-1, 2],
    "some.rates": [0.5, 0.1],
    "some.words": ["a", "", "ß"],
}


def test_files_equal_those_of_the_gguf_package_byte_for_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((3, 64), np.float32)
    numbers = np.array([1, -2, 3])
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0")
    tensors = {kind: encoded_tensor(matrix, TensorType[kind]) for kind in kinds}
    tensors["vector"] = encoded_tensor(matrix[0, :5], TensorType.F32)
    tensors["i32"] = encoded_tensor(numbers, TensorType.I32)
    tensors["i64"] = encoded_tensor(numbers, TensorType.I64)
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    write_gguf(ours, METADATA, tensors)

    writer = gguf.GGUFWriter(theirs, "some")
    writer.add_name("ä name")
    writer.add_bool("some.flag", True)
    writer.add_uint32("some.count", 3_000_000_000)
    writer.add_float32("some.rate", 0.1)
    writer.add_array("some.places", [-1, 2])
    writer.add_array("some.rates", [0.5, 0.1])
    writer.add_array("some.words", ["a", "", "ß"])
    for kind in kinds:
        of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(matrix, of), raw_dtype=of)
    writer.add_tensor("vector", matrix[0, :5].copy())
    writer.add_tensor("i32", numbers.astype(np.int32))
    writer.add_tensor("i64", numbers.astype(np.int64))
    finish_writer(writer, theirs)
    assert ours.read_bytes() == theirs.read_bytes()

    again = tmp_path / "again.gguf"
    file = GGUFFile(ours)
    stored = {
        name: NewTensor(of.shape, of.type, lambda name=name: file.raw(name))  # type: ignore[misc]
        for name, of in file.tensors.items()
    }
    write_gguf(again, file.encoded_metadata(), stored)
    assert again.read_bytes() == ours.read_bytes()


def test_only_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made_so_far: list[weakref.ref[Any]] = []
    alive = []

    def made() -> Any:
        gc.collect()
        alive.append(sum(ref() is not None for ref in made_so_far))
        data = np.ones((2, 4), np.float32)
        made_so_far.append(weakref.ref(data))
        return data

    tensors = {name: NewTensor((2, 4), TensorType.F32, made) for name in "abc"}
    shown: list[tuple[int, int]] = []
    write_gguf(tmp_path / "x.gguf", {}, tensors, lambda *of: shown.append(of))
    assert alive == [0, 0, 0]
    assert shown == [(32, 96), (64, 96), (96, 96)]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.EIO, os.strerror(errno.EIO)), OSError),
        (OSError(errno.ENOSPC, "No space left"), SpeculationError),
    ],
)
def test_a_partial_file_is_removed_when_writing_fails(
    tmp_path: Path, raised: BaseException, seen: type[BaseException]
) -> None:
    def fail() -> Any:
        assert [file.suffix for file in tmp_path.iterdir()] == [".partial"]
        raise raised

    file = tmp_path / "x.gguf"
    with pytest.raises(seen) as caught:
        write_gguf(file, {}, {"a": NewTensor((1,), TensorType.F32, fail)})
    assert list(tmp_path.iterdir()) == []
    if seen is SpeculationError:
        assert str(caught.value) == (
            f"cannot write {file}: the disk is full or over quota ({raised}); free some space or "
            f"write to another disk"
        )


def test_rows_that_do_not_fill_whole_blocks_are_refused(tmp_path: Path) -> None:
    odd = encoded_tensor(np.ones((2, 33), np.float32), TensorType.Q8_0)
    with pytest.raises(
        ValueError, match="rows of 33 values, not a multiple of the Q8_0 block size 32"
    ):
        write_gguf(tmp_path / "x.gguf", {}, {"a": odd})
    short = NewTensor((4,), TensorType.F32, lambda: np.ones(3, np.float32))
    with pytest.raises(ValueError, match="a has 12 bytes; its shape and type require 16"):
        write_gguf(tmp_path / "x.gguf", {}, {"a": short})
