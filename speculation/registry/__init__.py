"""Models by name: models.txt, and the way from a name to a GGUF file on this machine.

``entries`` says what a line means, ``hub`` fetches what is not here yet, ``packages`` finds files
of installed Python packages. Nothing in this package opens a GGUF file: whether it can be run is
for ``batching`` to say.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from batching.gguf.splits import part_names
from speculation.registry.entries import (
    FORM,
    HubFile,
    ModelEntry,
    ModelNotFound,
    PackageFile,
    RegistryError,
    parse_hub,
    parse_package,
    parse_registry,
    read_registry,
    registry_file,
)
from speculation.registry.hub import BarMaker, DownloadFailed, cached, fetch
from speculation.registry.packages import (
    checked_file,
    converted_file,
    is_converted,
    package_file,
)
from speculation.registry.packages import is_here as package_is_here
from speculation.registry.splits import first_part

__all__ = [
    "BUNDLED_MODEL",
    "PAIRED",
    "BarMaker",
    "Conversion",
    "DownloadFailed",
    "HubFile",
    "ModelEntry",
    "ModelNotFound",
    "PackageFile",
    "RegistryError",
    "conversion_of",
    "default_model",
    "fetch",
    "heads_for",
    "is_here",
    "paired_draft",
    "paired_heads",
    "parse_hub",
    "parse_package",
    "parse_registry",
    "read_registry",
    "registry_file",
    "resolve",
]

BUNDLED_MODEL = "bundled"
PAIRED = "paired"  # as a draft model or heads: what models.txt names for the model


@dataclass(frozen=True)
class Conversion:
    """A checked file that is to be converted once, to the type ``file_type``, as ``target``."""

    source: Path
    target: Path
    file_type: str


def default_model() -> str:
    """The first model of models.txt whose package is installed; the bundled one if none is."""
    try:
        entries = read_registry()
    except RegistryError:  # told as soon as any name is looked up
        return BUNDLED_MODEL
    found = (e.name for e in entries.values() if e.source.startswith("package:") and is_here(e))
    return next(found, BUNDLED_MODEL)


def is_here(entry: ModelEntry) -> bool:
    """Whether the entry's file is on this machine already."""
    if entry.source.startswith("hf:"):
        wanted = parse_hub(entry.source)
        parts = (replace(wanted, path=path) for path in part_names(wanted.path))
        return all(cached(part) for part in parts)
    if entry.source.startswith("package:"):
        return package_is_here(parse_package(entry.source))
    return _local_path(entry).is_file()


def conversion_of(name: str | os.PathLike[str]) -> Conversion | None:
    """What is still to be done before the model of this name is read in the type it asks for.

    None for paths, for models that ask for no other type, and where it was done. Raises
    ModelNotFound and RegistryError.
    """
    entry = read_registry().get(os.fspath(name))
    if entry is None or not entry.source.startswith("package:"):
        return None
    wanted = parse_package(entry.source)
    if wanted.file_type is None or is_converted(wanted):
        return None
    return Conversion(checked_file(wanted), converted_file(wanted), wanted.file_type)


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    registry: Mapping[str, ModelEntry] | None = None,
    progress: bool | None = None,
    bar: BarMaker | None = None,
) -> Path:
    """The GGUF file that a path, a name in models.txt or an ``hf:`` source stands for.

    An existing file is returned as it is. What lies on the hub is fetched once; after that no
    network is used. Of a file in a package the converted one is returned if it was made. Of a model
    in several files any one names it, and the first is returned.
    ``progress`` shows a bar always (True), never (False) or in a terminal (None); ``bar`` makes
    that bar in place of ``tqdm.tqdm``.

    Raises ModelNotFound, RegistryError when models.txt is malformed, DownloadFailed.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if path.is_file():
        return first_part(path)
    if text.startswith("hf:"):
        return _fetch_all(parse_hub(text), progress, bar)
    entries = read_registry() if registry is None else registry
    entry = entries.get(text)
    if entry is None:
        raise _not_found(text, entries)
    if entry.source.startswith("hf:"):
        return _fetch_all(parse_hub(entry.source), progress, bar)
    if entry.source.startswith("package:"):
        return package_file(parse_package(entry.source))
    return _local_file(entry)


def paired_draft(model: str | os.PathLike[str]) -> str:
    """The name of the draft model that models.txt gives for a model's name.

    Raises ModelNotFound where it gives none.
    """
    entries = read_registry()
    entry = entries.get(os.fspath(model))
    if entry is None or entry.draft is None:
        paired = ", ".join(name for name, other in entries.items() if other.draft)
        raise ModelNotFound(
            f"models.txt names no draft model for {os.fspath(model)!r}; give one by name or path "
            f"after --draft-model (models with one: {paired or 'none'})"
        )
    return entry.draft


def paired_heads(model: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of the drafting heads that models.txt gives for a model's name.

    Raises ModelNotFound where it gives none.
    """
    entries = read_registry()
    entry = entries.get(os.fspath(model))
    if entry is None or not entry.heads:
        paired = ", ".join(name for name, other in entries.items() if other.heads)
        raise ModelNotFound(
            f"models.txt names no drafting heads for {os.fspath(model)!r}; give them by name or "
            f"path after --heads (models with some: {paired or 'none'})"
        )
    return entry.heads


def heads_for(
    model: str | os.PathLike[str], heads: Sequence[str | os.PathLike[str]]
) -> Sequence[str | os.PathLike[str]]:
    """``heads`` as given, or for PAIRED alone those that models.txt names for the model."""
    return paired_heads(model) if list(heads) == [PAIRED] else heads


def _fetch_all(wanted: HubFile, progress: bool | None, bar: BarMaker | None) -> Path:
    """The file to open; those that belong to it are fetched too."""
    parts = [replace(wanted, path=path) for path in part_names(wanted.path)]
    files = [fetch(part, progress=progress, bar=bar) for part in parts]
    return files[0]


def _local_path(entry: ModelEntry) -> Path:
    if entry.source.startswith("bundled:"):
        return registry_file().parent / "models" / entry.source.removeprefix("bundled:")
    return Path(entry.source)


def _local_file(entry: ModelEntry) -> Path:
    path = _local_path(entry)
    if not entry.source.startswith("bundled:"):
        if path.is_file():
            return first_part(path)
        raise ModelNotFound(
            f"{entry.name!r} in models.txt stands for {path}, and there is no such file; "
            "correct the line or put the file there"
        )
    if path.is_file():
        return path
    raise ModelNotFound(
        f"the bundled model {path.name} is missing from {path.parent}; "
        "check out or install this program again, or choose another model"
    )


def _not_found(text: str, entries: Mapping[str, ModelEntry]) -> ModelNotFound:
    kind = "is a folder" if text and Path(text).is_dir() else "is no file and no known name"
    close = difflib.get_close_matches(text.lower(), entries, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return ModelNotFound(
        f"{text!r} {kind}.{guess} Known names: {', '.join(entries) or 'none'}. "
        f"Give the path of a .gguf file, hf:owner/repository/file.gguf, "
        f"or add a line to models.txt: {FORM}"
    )
