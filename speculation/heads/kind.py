"""HeadsKind: how a method recognises and loads files of its drafting heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.base import Head
from speculation.heads.file import ARCHITECTURE, HeadsFile


class HeadsKind(NamedTuple):
    """A kind of heads file.

    method    the method that drafts with the heads
    matches   whether a file is of this kind
    load      loads the heads for a model; raises HeadsError if they do not fit it
    of_model  the heads that the model itself contains, or None
    """

    method: str
    matches: Callable[[GGUFFile], bool]
    load: Callable[[GGUFFile, Model], Head]
    of_model: Callable[[Model], Head | None] = lambda model: None


def own_format(method: str, load: Callable[[HeadsFile, Model], Head]) -> HeadsKind:
    """Heads in this project's file format."""

    def matches(gguf: GGUFFile) -> bool:
        if gguf.metadata.get("general.architecture") != ARCHITECTURE:
            return False
        return gguf.metadata.get("heads.method") == method

    def load_checked(gguf: GGUFFile, model: Model) -> Head:
        file = HeadsFile(gguf.path)
        file.check_target(model)
        return load(file, model)

    return HeadsKind(method, matches, load_checked)


def llama_format(
    method: str, architecture: str, load: Callable[[GGUFFile, Model], Head]
) -> HeadsKind:
    """Heads written by llama.cpp's converter, with an architecture of their own."""
    return HeadsKind(
        method, lambda gguf: gguf.metadata.get("general.architecture") == architecture, load
    )
