"""Resolves a model's name to its file, converting it once if models.txt asks for that."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from batching.errors import SpeculationError
from batching.llama.quantize import quantize
from speculation import registry
from speculation.registry.entries import PackageFile
from speculation.registry.packages import converted_file, is_converted, verified_file

log = logging.getLogger(__name__)


def model_file(name_or_path: str | os.PathLike[str]) -> Path:
    """``registry.resolve`` after the conversion that models.txt asks for, if any.

    If the conversion fails, it logs a warning and uses the original file. Raises as ``resolve``.
    """
    entry = registry.read_registry().get(os.fspath(name_or_path))
    wanted = None if entry is None else entry.source
    if isinstance(wanted, PackageFile) and wanted.file_type and not is_converted(wanted):
        original = verified_file(wanted)
        try:
            quantize(original, converted_file(wanted), wanted.file_type)
        except (SpeculationError, OSError) as error:
            log.warning("could not convert %s, using it as it is: %s", original, error)
    return registry.resolve(name_or_path)
