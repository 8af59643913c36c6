"""Writes GGUF files, version 3 (ggml's docs/gguf.md), with one tensor in memory at a time.

``batching.llama.weights`` encodes and quantises tensors.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import SpeculationError
from batching.gguf.types import n_bytes
from batching.replacing import replacing

ALIGNMENT = 32  # bytes; tensor data starts at multiples of it
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # gguf_metadata_value_type

Array = npt.NDArray[Any]
# Integers are written as uint32 (int32 in lists), floats as float32. Bytes are a value encoded
# already, from GGUFFile.encoded_metadata.
Value = str | bool | int | float | bytes | Sequence[int] | Sequence[float] | Sequence[str]


class TensorType(IntEnum):
    """The ggml types this project writes."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q5_0 = 6
    Q8_0 = 8
    I32 = 26
    I64 = 27
    BF16 = 30


# general.file_type (llama_ftype) by the type of a model's matrices.
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "bf16": 32}
QUANTIZATION_VERSION = 2  # of ggml's block formats


class NewTensor(NamedTuple):
    """A tensor to write.

    shape  NumPy order, rows first
    type   a ggml_type
    data   returns the encoded bytes; called when the tensor is written
    """

    shape: tuple[int, ...]
    type: int
    data: Callable[[], Array]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, NewTensor],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GGUF to ``path``, which appears only once complete.

    ``progress(bytes_done, bytes_total)`` is called after each tensor. Raises
    SpeculationError if the disk is full.
    """
    sizes = [n_bytes(tensor.shape, tensor.type) for tensor in tensors.values()]
    try:
        with replacing(path) as file:
            written = file.write(b"".join(_header(metadata, tensors, sizes)))
            file.write(_padding(written))
            done = 0
            for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
                _write_data(file, name, tensor, size)
                done += size
                if progress is not None:
                    progress(done, sum(sizes))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SpeculationError(
            f"cannot write {path}: the disk is full or over quota ({error}); free some space or "
            f"write to another disk"
        ) from error


def _write_data(file: BinaryIO, name: str, tensor: NewTensor, size: int) -> None:
    data = np.ascontiguousarray(tensor.data())
    if data.nbytes != size:
        raise ValueError(f"{name} has {data.nbytes} bytes; its shape and type require {size}")
    file.write(data.data)
    file.write(_padding(size))


def _header(
    metadata: Mapping[str, Value], tensors: Mapping[str, NewTensor], sizes: Sequence[int]
) -> Iterator[bytes]:
    yield b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        yield _text(key) + (value if isinstance(value, bytes) else _value(value))
    offset = 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        axes = tensor.shape[::-1]
        yield _text(name)
        yield struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, tensor.type, offset)
        offset += size + len(_padding(size))


def _value(value: Value) -> bytes:
    """Encode a metadata value, preceded by its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    first = value[0] if value else 0.0
    inner = _STRING if isinstance(first, str) else _INT32 if isinstance(first, int) else _FLOAT32
    form = {_INT32: "i", _FLOAT32: "f"}
    items = (
        _text(item) if isinstance(item, str) else struct.pack(f"<{form[inner]}", item)
        for item in value
    )
    return struct.pack("<IIQ", _ARRAY, inner, len(value)) + b"".join(items)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padding(n: int) -> bytes:
    return bytes(-n % ALIGNMENT)
