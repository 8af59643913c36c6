"""The way from a model's name to the file to load, converted once where models.txt asks for it."""

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
    """What ``registry.resolve`` gives, after the conversion that the model asks for.

    A conversion that fails is a warning, and the file is used as it came. Raises as ``resolve``.
    """
    todo = pending_conversion(name_or_path)
    if todo is not None:
        try:
            quantize(todo.source, todo.target, todo.file_type)
        except (SpeculationError, OSError) as error:
            log.warning("%s is used unconverted: %s", todo.source, error)
    return resolve(name_or_path, progress=progress, bar=bar)
