"""Resolves a model's name to its file, converting it once if models.txt asks for that."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from batching.errors import SpeculationError
from batching.llama.quantize import quantize
from speculation.registry import BarMaker, pending_conversion, resolve

log = logging.getLogger(__name__)


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
