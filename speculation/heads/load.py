"""Heads files -> heads that are ready to draft, by the method that uses them."""

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
    """A kind of heads.

    method   the method that drafts with them
    matches  whether a file holds such heads
    load     makes them for a model; raises HeadsError where they do not fit it
    """

    method: str
    matches: Callable[[GGUFFile], bool]
    load: Callable[[GGUFFile, Model], Any]


def _own(method: str, load: Callable[[HeadsFile, Model], Any]) -> HeadsKind:
    """Heads in this project's own form of file."""

    def matches(gguf: GGUFFile) -> bool:
        is_own = gguf.metadata.get("general.architecture") == ARCHITECTURE
        return is_own and gguf.metadata.get("heads.method") == method

    def load_checked(gguf: GGUFFile, model: Model) -> Any:
        file = HeadsFile(gguf.path)
        file.check_target(model)
        return load(file, model)

    return HeadsKind(method, matches, load_checked)


def _converted(method: str, architecture: str, load: Callable[[GGUFFile, Model], Any]) -> HeadsKind:
    """Heads that llama.cpp's converter wrote, which have an architecture of their own."""
    return HeadsKind(
        method, lambda gguf: gguf.metadata.get("general.architecture") == architecture, load
    )


KINDS = (
    _own("medusa", load_medusa),
    _own("redrafter", load_redrafter),
    _own("eagle", load_eagle),
    _converted(eagle3.METHOD, eagle3.ARCHITECTURE, eagle3.load_eagle3),
    _converted(mtp.METHOD, assistant.ARCHITECTURE, assistant.load_assistant),
    _converted(dflash.METHOD, dflash.ARCHITECTURE, dflash.load_dflash),
    HeadsKind(
        mtp.METHOD, lambda gguf: find_mtp_layers(gguf.path, MTP_GRAPHS).mtp_only, mtp.load_mtp
    ),
)


def require_no_heads(path: Path) -> None:
    """Say so where what could not be loaded as a model is a file of heads. Raises HeadsError."""
    try:
        gguf = GGUFFile(path)
        is_heads = any(kind.matches(gguf) for kind in KINDS)
    except ModelError:
        return  # what is wrong with it was found before
    if is_heads or gguf.metadata.get("general.architecture") == ARCHITECTURE:
        raise HeadsError(
            f"{path} is no model: it holds drafting heads, which draft for the model that they "
            f"were trained on; give it with --heads, and that model with --model"
        )


def load_heads(paths: Iterable[Path], model: Model) -> dict[str, Any]:
    """The heads of each file by their method, checked against ``model``, and its own if loaded.

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF; HeadsError for a file of something else, of
    another model, or of a method that another file is for already; VocabularyMismatch,
    UnsupportedModel where llama.cpp lacks what the heads need of the model; OutOfMemory.
    """
    found: dict[str, Any] = {}
    files: dict[str, Path] = {}
    try:
        for path in paths:
            gguf = GGUFFile(path)
            kind = _kind(gguf)
            method = kind.method
            if method in files:
                raise HeadsError(
                    f"{files[method].name} and {path.name} are both heads for {method}; give one"
                )
            files[method] = path
            found[method] = kind.load(gguf, model)
        if model.n_mtp and mtp.METHOD not in found:
            found[mtp.METHOD] = mtp.MtpHead(model, model)
    except BaseException:
        for head in found.values():
            if isinstance(head, HeadInContext):
                head.close()
        raise
    return found


def _kind(gguf: GGUFFile) -> HeadsKind:
    for kind in KINDS:
        if kind.matches(gguf):
            return kind
    method = HeadsFile(gguf.path).info.method  # raises for a file of something else
    methods = ", ".join(dict.fromkeys(kind.method for kind in KINDS))
    raise HeadsError(
        f"{gguf.path} holds heads for the method {method!r}, which this version does not have; "
        f"it has {methods}"
    )
