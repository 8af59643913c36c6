"""Quantises a GGUF to another weight type. Part of the llama.cpp edge."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp.llama_cpp as C

from batching.errors import InvalidParameter, ModelError
from batching.llama.interrupts import deferred_interrupts
from batching.llama.log import clear_log, initialise, reason
from batching.replacing import replacing

_PREFIX = "LLAMA_FTYPE_MOSTLY_"
_FILE_TYPES: dict[str, int] = {
    name.removeprefix(_PREFIX): value for name, value in vars(C).items() if name.startswith(_PREFIX)
}


def file_type_name(number: int) -> str:
    """llama.cpp's name for a GGUF's ``general.file_type``, such as Q4_K_M; empty if unknown."""
    return next((name for name, value in _FILE_TYPES.items() if value == number), "")


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Quantise ``source`` to ``file_type`` and write ``target``, which appears once complete.

    ``file_type`` is llama.cpp's name, such as Q8_0 or Q4_0. A quantised source is requantised.
    Raises InvalidParameter, ModelError and OSError.
    """
    if file_type not in _FILE_TYPES:
        raise InvalidParameter(
            f"llama.cpp has no type {file_type!r}; give a type such as Q8_0 or Q4_0"
        )
    params = C.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[file_type]
    params.allow_requantize = True
    target.parent.mkdir(parents=True, exist_ok=True)
    initialise()
    clear_log()
    with replacing(target) as file, deferred_interrupts():
        if C.llama_model_quantize(os.fsencode(source), os.fsencode(file.name), params):
            raise ModelError(f"{source} cannot be converted to {file_type}: {reason()}")
