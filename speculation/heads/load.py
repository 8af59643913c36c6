"""load_heads: loads drafting heads of any kind from their files, and checks that they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from batching.errors import HeadsError, ModelError
from batching.gguf.mtp import find_mtp_layers
from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.llama.private_api import MTP_GRAPHS
from speculation.heads import assistant, dflash, eagle3, mtp
from speculation.heads.base import HeadInContext
from speculation.heads.eagle_file import load_eagle
from speculation.heads.file import ARCHITECTURE, HeadsFile
from speculation.heads.medusa_file import load_medusa
from speculation.heads.redrafter_file import load_redrafter


class HeadsKind(NamedTuple):
    """A kind of heads file.

    method   the method that drafts with the heads
    matches  whether a file is of this kind
    load     loads the heads for a model; raises HeadsError if they do not fit it
    """

    method: str
    matches: Callable[[GGUFFile], bool]
    load: Callable[[GGUFFile, Model], Any]


def _own_format(method: str, load: Callable[[HeadsFile, Model], Any]) -> HeadsKind:
    """Heads in this project's file format."""

    def matches(gguf: GGUFFile) -> bool:
        if gguf.metadata.get("general.architecture") != ARCHITECTURE:
            return False
        return gguf.metadata.get("heads.method") == method

    def load_checked(gguf: GGUFFile, model: Model) -> Any:
        file = HeadsFile(gguf.path)
        file.check_target(model)
        return load(file, model)

    return HeadsKind(method, matches, load_checked)


def _llama_format(
    method: str, architecture: str, load: Callable[[GGUFFile, Model], Any]
) -> HeadsKind:
    """Heads written by llama.cpp's converter, with an architecture of their own."""
    return HeadsKind(
        method, lambda gguf: gguf.metadata.get("general.architecture") == architecture, load
    )


KINDS = (
    _own_format("medusa", load_medusa),
    _own_format("redrafter", load_redrafter),
    _own_format("eagle", load_eagle),
    _llama_format(eagle3.METHOD, eagle3.ARCHITECTURE, eagle3.load_eagle3),
    _llama_format(mtp.METHOD, assistant.ARCHITECTURE, assistant.load_assistant),
    _llama_format(dflash.METHOD, dflash.ARCHITECTURE, dflash.load_dflash),
    HeadsKind(
        mtp.METHOD, lambda gguf: find_mtp_layers(gguf.path, MTP_GRAPHS).mtp_only, mtp.load_mtp
    ),
)


def require_no_heads(path: Path) -> None:
    """Raise HeadsError if the file, given as a model, contains drafting heads instead."""
    try:
        gguf = GGUFFile(path)
        is_heads = any(kind.matches(gguf) for kind in KINDS)
    except ModelError:
        return  # other checks report a broken file
    if is_heads or gguf.metadata.get("general.architecture") == ARCHITECTURE:
        raise HeadsError(
            f"{path} contains drafting heads, not a model; give it with {{heads}}, and the model "
            f"it was trained for with {{model}}",
            settings=("heads", "model"),
        )


def load_heads(paths: Iterable[Path], model: Model) -> dict[str, Any]:
    """Load heads for ``model``, by method; includes the model's own MTP layer if it is loaded.

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF; HeadsError for a file without heads, with heads
    for another model, or with heads for the same method as another file; VocabularyMismatch;
    UnsupportedModel if llama.cpp lacks something the heads need; OutOfMemory.
    """
    heads: dict[str, Any] = {}
    files: dict[str, Path] = {}
    try:
        for path in paths:
            gguf = GGUFFile(path)
            kind = _kind(gguf)
            method = kind.method
            if method in files:
                raise HeadsError(
                    f"{files[method].name} and {path.name} are both heads for {method}; give only "
                    f"one of them"
                )
            files[method] = path
            heads[method] = kind.load(gguf, model)
        if model.n_mtp and mtp.METHOD not in heads:
            heads[mtp.METHOD] = mtp.MtpHead(model, model)
    except BaseException:
        for head in heads.values():
            if isinstance(head, HeadInContext):
                head.close()
        raise
    return heads


def _kind(gguf: GGUFFile) -> HeadsKind:
    for kind in KINDS:
        if kind.matches(gguf):
            return kind
    method = HeadsFile(gguf.path).info.method  # raises HeadsError if the file has no heads
    methods = ", ".join(dict.fromkeys(kind.method for kind in KINDS))
    raise HeadsError(
        f"{gguf.path} contains heads for method {method!r}, which this version does not support; "
        f"it supports {methods}"
    )
