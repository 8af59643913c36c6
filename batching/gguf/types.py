"""Tensor storage types of the GGUF format: values and bytes per block.

Keyed by ``enum ggml_type`` (ggml.h). A test compares the table with the installed library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Encoding(NamedTuple):
    """A block of ``n_bytes`` encodes ``n_values`` consecutive values of a row."""

    name: str
    n_values: int
    n_bytes: int


F32, F16, I32, BF16 = 0, 1, 26, 30
TYPES = {
    F32: Encoding("F32", 1, 4),
    F16: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    9: Encoding("Q8_1", 32, 36),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    15: Encoding("Q8_K", 256, 292),
    16: Encoding("IQ2_XXS", 256, 66),
    17: Encoding("IQ2_XS", 256, 74),
    18: Encoding("IQ3_XXS", 256, 98),
    19: Encoding("IQ1_S", 256, 50),
    20: Encoding("IQ4_NL", 32, 18),
    21: Encoding("IQ3_S", 256, 110),
    22: Encoding("IQ2_S", 256, 82),
    23: Encoding("IQ4_XS", 256, 136),
    24: Encoding("I8", 1, 1),
    25: Encoding("I16", 1, 2),
    I32: Encoding("I32", 1, 4),
    27: Encoding("I64", 1, 8),
    28: Encoding("F64", 1, 8),
    29: Encoding("IQ1_M", 256, 56),
    BF16: Encoding("BF16", 1, 2),
    34: Encoding("TQ1_0", 256, 54),
    35: Encoding("TQ2_0", 256, 66),
    39: Encoding("MXFP4", 32, 17),
    40: Encoding("NVFP4", 64, 36),
    41: Encoding("Q1_0", 128, 18),
    42: Encoding("Q2_0", 64, 18),
}
# Types that llama.cpp no longer supports.
REMOVED = (4, 5, 31, 32, 33, 36, 37, 38)
# Not valid for weights: integers, and types used only for intermediate results.
NOT_FOR_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")


def type_name(number: int) -> str:
    """The type's name, such as ``Q4_K``; the number itself if unknown."""
    return TYPES[number].name if number in TYPES else str(number)


def n_bytes(shape: Sequence[int], kind: int) -> int:
    """Bytes of a tensor of a known type. Raises ValueError unless rows are whole blocks."""
    block, width = TYPES[kind], shape[-1] if shape else 1
    if width % block.n_values:
        raise ValueError(
            f"rows of {width} values, not a multiple of the {block.name} block size "
            f"{block.n_values}"
        )
    return math.prod(shape) // block.n_values * block.n_bytes
