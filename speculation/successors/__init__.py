"""The successor table that token recycling starts with, made once for each model from a text."""

from __future__ import annotations

from pathlib import Path

from batching.model import Model
from speculation.drafters.recycling import SuccessorTable
from speculation.user_cache import cache_folder

SUFFIX = ".successors.npz"


def load_successors(model: Model) -> SuccessorTable:
    """The table of ``model``: beside its file, else in the user's cache, else an empty one."""
    for path in (model.path.with_suffix(SUFFIX), cached_file(model)):
        if path.is_file():
            return SuccessorTable.load(path, model.n_vocab)
    return SuccessorTable()


def cached_file(model: Model) -> Path:
    """Where the table of a model is kept when it does not lie beside it."""
    return cache_folder() / "successors" / f"{model.path.stem}-{model.n_bytes}{SUFFIX}"
