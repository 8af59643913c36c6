"""Dequantises and quantises GGUF tensors with the loaded ggml."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.gguf.types import n_bytes, type_name
from batching.gguf.writer import Array, NewTensor, TensorType
from batching.llama.library import declared
from batching.tree import Floats

_NUMPY_TYPES: dict[int, type[np.generic]] = {
    TensorType.F32: np.float32,
    TensorType.F16: np.float16,
    TensorType.I32: np.int32,
    TensorType.I64: np.int64,
}


class Weights(GGUFFile):
    """A GGUF whose quantised tensors can be read too.

    ``tensor``, ``rows`` and ``output_matrix`` raise UnsupportedModel for a type ggml cannot
    dequantise.
    """

    def _dequantized(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        tensor = self.tensors[name]
        values: Floats = np.empty((len(data), tensor.shape[-1]), np.float32)
        to_float = traits(tensor.type).to_float
        if not to_float:
            raise UnsupportedModel(
                f"{self.path}: {name} has type {type_name(tensor.type)}, which ggml cannot "
                f"dequantise; choose another quantisation"
            )
        data = np.ascontiguousarray(data)
        to_float(data.ctypes.data, values.ctypes.data, values.size)
        return values


class Traits(ctypes.Structure):
    """ggml_type_traits, up to the dequantisation function."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@cache
def traits(kind: int) -> Any:
    """ggml's traits of a type in ``batching.gguf.types``; ggml does not check the index."""
    return declared("ggml_get_type_traits", ctypes.POINTER(Traits), ctypes.c_int)(kind).contents


def encoded_tensor(values: Array, kind: int) -> NewTensor:
    """A tensor to write, with ``values`` encoded as type ``kind``."""
    return NewTensor(values.shape, kind, lambda: encode(values, kind))


def encode(values: Array, kind: int) -> Array:
    """Encode ``values`` as type ``kind``: F32, F16, I32, I64 or a quantised type.

    Raises ValueError if a row is not a whole number of blocks.
    """
    if kind in _NUMPY_TYPES:
        return np.ascontiguousarray(values, _NUMPY_TYPES[kind])
    floats = np.ascontiguousarray(values, np.float32)
    width = floats.shape[-1]
    encoded = np.empty(n_bytes(floats.shape, kind), np.uint8)
    address = ctypes.c_void_p
    types = ctypes.c_int, address, address, *[ctypes.c_int64] * 3, address
    quantize = declared("ggml_quantize_chunk", ctypes.c_size_t, *types)
    n, importance = floats.size // width, None
    quantize(kind, floats.ctypes.data, encoded.ctypes.data, 0, n, width, importance)
    return encoded
