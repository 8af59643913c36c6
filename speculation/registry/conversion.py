"""Resolves a model's name to its file, converting it once if models.txt asks for that.

As a program, ``python -m speculation.registry.conversion SOURCE TARGET TYPE`` converts a file: a
server does that in a process of its own, since llama.cpp may end it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from batching.errors import SpeculationError
from batching.gguf.reader import fingerprint
from batching.llama.quantize import quantize
from speculation.registry import BarMaker, pending_conversion, resolve
from speculation.system.cache_folder import cache_folder

log = logging.getLogger(__name__)

# Types that are faster here as another one: Q4_1 has no kernel for many rows on x86, and reads
# prompts at half the speed of Q8_0.
FASTER = {"Q4_1": "Q8_0"}


def model_file(
    name_or_path: str | os.PathLike[str],
    *,
    progress: bool | None = None,
    bar: BarMaker | None = None,
) -> Path:
    """``registry.resolve`` after the conversion that models.txt asks for, if any.

    If the conversion fails, it logs a warning and uses the original file. Raises as ``resolve``.
    """
    pending = pending_conversion(name_or_path)
    if pending is not None:
        try:
            quantize(*pending)
        except (SpeculationError, OSError) as error:
            log.warning("could not convert %s, using it as it is: %s", pending[0], error)
    return resolve(name_or_path, progress=progress, bar=bar)


def converted_path(source: Path, file_type: str) -> Path:
    """Where a conversion of ``source`` is kept. Its name tells the source's content."""
    name = f"{source.stem}-{fingerprint(source)[:12]}-{file_type}.gguf"
    return cache_folder() / "models" / name


if __name__ == "__main__":
    try:
        quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except (SpeculationError, OSError) as failure:
        sys.exit(str(failure))
