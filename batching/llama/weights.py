"""Tensors of a GGUF as numbers, of every type that the loaded ggml can turn into float32."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.gguf.types import type_name
from batching.llama.library import exported
from batching.tree import Floats


class Weights(GGUFFile):
    """A GGUF whose quantised tensors can be read as well.

    ``tensor``, ``rows`` and ``output_matrix`` raise UnsupportedModel for a type without a way back
    to numbers.
    """

    def _dequantized(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        tensor = self.tensors[name]
        values: Floats = np.empty((len(data), tensor.shape[-1]), np.float32)
        to_float = traits(tensor.type).to_float
        if not to_float:
            raise UnsupportedModel(
                f"{self.path}: {name} is of type {type_name(tensor.type)}, which ggml cannot "
                f"turn into numbers; take another quantisation"
            )
        data = np.ascontiguousarray(data)
        to_float(data.ctypes.data, values.ctypes.data, values.size)
        return values


class Traits(ctypes.Structure):
    """ggml's ggml_type_traits, as far as the function that dequantises."""

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
    """What ggml knows of a type of ``batching.gguf.types``: past its table it reads anything."""
    get = exported("ggml_get_type_traits")
    get.restype, get.argtypes = ctypes.POINTER(Traits), [ctypes.c_int]
    return get(kind).contents
