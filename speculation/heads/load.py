"""Heads files -> heads that are ready to draft, by the method that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from batching.errors import HeadsError, ModelError
from batching.gguf.mtp import find_mtp_layers
from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.llama.private_api import MTP_GRAPHS
from speculation.heads import assistant, dflash, eagle3, mtp
from speculation.heads.eagle import HeadInContext
from speculation.heads.eagle_file import load_eagle
from speculation.heads.file import ARCHITECTURE, HeadsFile
from speculation.heads.medusa_file import load_medusa
from speculation.heads.redrafter_file import load_redrafter

LOADERS: dict[str, Callable[[HeadsFile, Model], Any]] = {
    "medusa": load_medusa,
    "redrafter": load_redrafter,
    "eagle": load_eagle,
}


def require_no_heads(path: Path) -> None:
    """Say so where what could not be loaded as a model is a file of heads. Raises HeadsError."""
    try:
        architecture = GGUFFile(path).metadata.get("general.architecture")
        is_mtp_alone = find_mtp_layers(path, MTP_GRAPHS).alone
    except ModelError:
        return  # what is wrong with it was found before
    if is_mtp_alone or architecture in (
        ARCHITECTURE,
        assistant.ARCHITECTURE,
        dflash.ARCHITECTURE,
        eagle3.ARCHITECTURE,
    ):
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
            method, load = _loader(path)
            if method in files:
                raise HeadsError(
                    f"{files[method].name} and {path.name} are both heads for {method}; give one"
                )
            files[method] = path
            found[method] = load(model)
        if model.n_mtp and mtp.METHOD not in found:
            found[mtp.METHOD] = mtp.MtpHead(model, model)
    except BaseException:
        for head in found.values():
            if isinstance(head, HeadInContext):
                head.close()
        raise
    return found


def _loader(path: Path) -> tuple[str, Callable[[Model], Any]]:
    """What method the file is for, and what loads it for a model."""
    gguf = GGUFFile(path)
    architecture = gguf.metadata.get("general.architecture")
    if architecture == eagle3.ARCHITECTURE:
        return eagle3.METHOD, partial(eagle3.load_eagle3, gguf)
    if architecture == dflash.ARCHITECTURE:
        return dflash.METHOD, partial(dflash.load_dflash, gguf)
    if architecture == assistant.ARCHITECTURE:
        return mtp.METHOD, partial(assistant.load_assistant, gguf)
    if find_mtp_layers(path, MTP_GRAPHS).alone:
        return mtp.METHOD, partial(mtp.load_mtp, gguf)
    file = HeadsFile(path)
    method = file.info.method
    if method not in LOADERS:
        raise HeadsError(
            f"{path} holds heads for the method {method!r}, which this version does not "
            f"have; it has {', '.join((*LOADERS, eagle3.METHOD, mtp.METHOD, dflash.METHOD))}"
        )

    def load(model: Model) -> Any:
        file.check_target(model)
        return LOADERS[method](file, model)

    return method, load
