"""Quantises a GGUF to another weight type. Part of the llama.cpp edge."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as C

from batching.errors import InvalidParameter, ModelError
from batching.llama.interrupts import deferred_interrupts
from batching.llama.log import clear_log, initialise, reason

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
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        initialise()
        clear_log()
        with deferred_interrupts():
            code = C.llama_model_quantize(os.fsencode(source), os.fsencode(part), params)
        if code:
            raise ModelError(f"{source} cannot be converted to {file_type}: {reason()}")
        part.chmod(0o644)  # mkstemp creates it readable by the owner only
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
