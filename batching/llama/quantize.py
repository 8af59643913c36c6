"""Converts a GGUF to another type of weights. Part of the llama.cpp edge."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as C

from batching.errors import InvalidParameter, ModelError
from batching.llama.interrupts import held_interrupts
from batching.llama.model import forget_log, initialise, recent_log


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Write ``source`` with weights of ``file_type`` as ``target``, which appears when it is whole.

    ``file_type`` is llama.cpp's name of a type, as in Q8_0 or Q4_0. A source that is quantized
    already is converted from what it holds. Raises InvalidParameter, ModelError and OSError.
    """
    number = getattr(C, f"LLAMA_FTYPE_MOSTLY_{file_type}", None)
    if number is None:
        raise InvalidParameter(f"llama.cpp has no type {file_type!r}; give one as Q8_0 or Q4_0")
    params = C.llama_model_quantize_default_params()
    params.ftype = number
    params.allow_requantize = True
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        initialise()
        forget_log()
        with held_interrupts():
            code = C.llama_model_quantize(os.fsencode(source), os.fsencode(part), params)
        if code:
            raise ModelError(f"{source} cannot be converted to {file_type}: {recent_log()}")
        part.chmod(0o644)  # mkstemp keeps others out
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
