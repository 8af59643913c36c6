"""Heads files -> heads that are ready to draft, by the method that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from batching.errors import HeadsError
from batching.model import Model
from speculation.heads.eagle_file import load_eagle
from speculation.heads.file import HeadsFile
from speculation.heads.medusa_file import load_medusa

LOADERS: dict[str, Callable[[HeadsFile, Model], Any]] = {
    "medusa": load_medusa,
    "eagle": load_eagle,
}


def load_heads(paths: Iterable[Path], model: Model) -> dict[str, Any]:
    """The heads of each file by their method, checked against ``model``.

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF; HeadsError for a file of something else, of
    another model, or of a method that another file is for already; OutOfMemory.
    """
    found: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for path in paths:
        file = HeadsFile(path)
        method = file.info.method
        if method not in LOADERS:
            raise HeadsError(
                f"{path} holds heads for the method {method!r}, which this version does not have; "
                f"it has {', '.join(LOADERS)}"
            )
        if method in files:
            raise HeadsError(
                f"{files[method].name} and {path.name} are both heads for {method}; give one"
            )
        file.check_target(model)
        files[method] = path
        found[method] = LOADERS[method](file, model)
    return found
