"""Writes GGUF files, version 3 (ggml's docs/gguf.md), with one tensor in memory at a time.

ggml itself turns float32 into the types it stores, so this needs no further package.
"""

from __future__ import annotations

import ctypes
import errno
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import SpeculationError
from batching.llama.library import exported

ALIGNMENT = 32  # bytes: where the data of a tensor may start
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # gguf_metadata_value_type

Array = npt.NDArray[Any]
# Whole numbers are written as uint32 (in lists as int32), others as float32. Bytes are a value
# that is encoded already, as GGUFFile.encoded_metadata gives it.
Value = str | bool | int | float | bytes | Sequence[int] | Sequence[float] | Sequence[str]


class DiskFull(SpeculationError):
    """There is no room for the file; the message names it and the way out."""


class TensorType(IntEnum):
    """Those of ggml's types that are written here."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q5_0 = 6
    Q8_0 = 8
    I32 = 26
    I64 = 27
    BF16 = 30


# What the matrices of a model are, as its general.file_type says it (llama_ftype).
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "bf16": 32}
QUANTIZATION_VERSION = 2  # of ggml's block formats

_NUMPY_TYPES: dict[int, type[np.generic]] = {
    TensorType.F32: np.float32,
    TensorType.F16: np.float16,
    TensorType.I32: np.int32,
    TensorType.I64: np.int64,
}


class NewTensor(NamedTuple):
    """A tensor to write.

    shape  rows first, as NumPy has it
    type   a ggml_type
    data   gives what is written, as ggml stores it; called when the tensor's turn comes
    """

    shape: tuple[int, ...]
    type: int
    data: Callable[[], Array]

    @classmethod
    def of(cls, values: Array, kind: int) -> NewTensor:
        """A tensor of these numbers in the type ``kind``."""
        return cls(values.shape, kind, lambda: encode(values, kind))


def encode(values: Array, kind: int) -> Array:
    """Numbers as ggml stores them in the type ``kind``: F32, F16, I32, I64 or a quantised one.

    Raises ValueError where rows are no whole blocks of a quantised type.
    """
    if kind in _NUMPY_TYPES:
        return np.ascontiguousarray(values, _NUMPY_TYPES[kind])
    floats = np.ascontiguousarray(values, np.float32)
    width = floats.shape[-1]
    encoded = np.empty(n_bytes(floats.shape, kind), np.uint8)
    _ggml("ggml_quantize_chunk", ctypes.c_size_t)(
        ctypes.c_int(kind),
        ctypes.c_void_p(floats.ctypes.data),
        ctypes.c_void_p(encoded.ctypes.data),
        ctypes.c_int64(0),
        ctypes.c_int64(floats.size // width),
        ctypes.c_int64(width),
        None,  # importance of each column: all alike
    )
    return encoded


def n_bytes(shape: Sequence[int], kind: int) -> int:
    """What a tensor takes in the file, without padding.

    Raises ValueError where rows are no whole blocks of a quantised type.
    """
    block = int(_ggml("ggml_blck_size", ctypes.c_int64)(ctypes.c_int(kind)))
    if shape[-1] % block:  # ggml ends the process for these
        raise ValueError(f"rows of {shape[-1]} are no whole blocks of {block}; write F16 or F32")
    row_size = _ggml("ggml_row_size", ctypes.c_size_t)
    return math.prod(shape[:-1]) * int(row_size(ctypes.c_int(kind), ctypes.c_int64(shape[-1])))


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, NewTensor],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GGUF. ``path`` gets its name when it is whole; otherwise nothing is left.

    ``progress(bytes_done, bytes_total)`` is called after each tensor. Raises DiskFull.
    """
    sizes = [n_bytes(tensor.shape, tensor.type) for tensor in tensors.values()]
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            written = file.write(b"".join(_header(metadata, tensors, sizes)))
            file.write(_padding(written))
            done = 0
            for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
                _write_data(file, name, tensor, size)
                done += size
                if progress is not None:
                    progress(done, sum(sizes))
        partial.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"cannot write {path}: the disk is full, or its quota used up ({error}); make room, or "
            f"give a file on another disk"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _write_data(file: BinaryIO, name: str, tensor: NewTensor, size: int) -> None:
    data = np.ascontiguousarray(tensor.data())
    if data.nbytes != size:
        raise ValueError(f"{name} has {data.nbytes} bytes, and its shape and type make {size}")
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
    """A metadata value with its type before it."""
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


def _ggml(name: str, result: Any) -> Any:
    function = exported(name)
    function.restype = result
    return function
