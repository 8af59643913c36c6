"""Loads drafting heads from their files, checks that they fit, and tells such files from models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from batching.errors import ModelError
from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.file import ARCHITECTURE, HeadsFile, HeadsKind


def require_no_heads(path: Path, kinds: Iterable[HeadsKind]) -> None:
    """Raise ModelError if the file, given as a model, contains drafting heads instead."""
    try:
        gguf = GGUFFile(path)
        is_heads = any(kind.matches(gguf) for kind in kinds)
    except ModelError:
        return  # other checks report a broken file
    if is_heads or gguf.metadata.get("general.architecture") == ARCHITECTURE:
        raise ModelError(
            f"{path} contains drafting heads, not a model; give it with {{heads}}, and the model "
            f"it was trained for with {{model}}",
            settings=("heads", "model"),
        )


def load_heads(paths: Iterable[Path], model: Model, kinds: Sequence[HeadsKind]) -> dict[str, Any]:
    """Load heads of any of ``kinds`` for ``model``, by method; also those the model contains.

    Raises ModelError for a file that is damaged or incomplete, without heads, with heads
    for another model, or with heads for the same method as another file; UnsupportedModel;
    UnsupportedModel if llama.cpp lacks something the heads need; OutOfMemory.
    """
    heads: dict[str, Any] = {}
    files: dict[str, Path] = {}
    try:
        for path in paths:
            gguf = GGUFFile(path)
            kind = _kind(gguf, kinds)
            method = kind.method
            if method in files:
                raise ModelError(
                    f"{files[method].name} and {path.name} are both heads for {method}; give only "
                    f"one of them"
                )
            files[method] = path
            heads[method] = kind.load(gguf, model)
        for kind in kinds:
            if kind.method not in heads and (head := kind.of_model(model)) is not None:
                heads[kind.method] = head
    except BaseException:
        for head in heads.values():
            head.close()
        raise
    return heads


def _kind(gguf: GGUFFile, kinds: Sequence[HeadsKind]) -> HeadsKind:
    for kind in kinds:
        if kind.matches(gguf):
            return kind
    method = HeadsFile(gguf.path).info.method  # raises ModelError if the file has no heads
    methods = ", ".join(dict.fromkeys(kind.method for kind in kinds))
    raise ModelError(
        f"{gguf.path} contains heads for method {method!r}, which this version does not support; "
        f"it supports {methods}"
    )
