"""A small GGUF written without further packages: for models put together while the program runs.

Heads that llama.cpp is to run lack what they share with their target; joined with it they are a
model file like any other. Format: ggml's docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8  # gguf_metadata_value_type


class RawTensor(NamedTuple):
    """A tensor as ggml stores it: ``shape`` is rows first, ``type`` a ggml_type."""

    shape: tuple[int, ...]
    type: int
    data: npt.NDArray[np.uint8]


def write_gguf(
    path: Path, metadata: Mapping[str, str | int | float], tensors: Mapping[str, RawTensor]
) -> None:
    """Write a GGUF: whole numbers as uint32, others as float32, texts; tensors as they are."""
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header.append(_text(key))
        if isinstance(value, str):
            header += [struct.pack("<I", _STRING), _text(value)]
        elif isinstance(value, int):
            header.append(struct.pack("<II", _UINT32, value))
        else:
            header.append(struct.pack("<If", _FLOAT32, value))
    offset = 0
    for name, tensor in tensors.items():
        axes = tensor.shape[::-1]
        header.append(_text(name))
        header.append(struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, tensor.type, offset))
        offset += _padded(tensor.data.nbytes)
    with path.open("wb") as file:
        written = file.write(b"".join(header))
        file.write(bytes(_padded(written) - written))
        for tensor in tensors.values():
            np.ascontiguousarray(tensor.data).tofile(file)
            file.write(bytes(_padded(tensor.data.nbytes) - tensor.data.nbytes))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
