"""Models by name: resolves names in models.txt and ``hf:`` sources to local GGUF files.

``entries`` parses models.txt, ``hub`` downloads from the Hugging Face Hub, ``packages`` finds files
of installed Python packages, ``conversion`` converts one once if models.txt asks for that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from batching.gguf.splits import part_names
from speculation.registry.entries import (
    HubFile,
    ModelEntry,
    ModelNotFound,
    PackageFile,
    RegistryError,
    parse_hub,
    read_registry,
)
from speculation.registry.found import OLLAMA, ollama_file
from speculation.registry.hub import BarMaker, DownloadFailed, cached, fetch, terminal_bar
from speculation.registry.packages import installed_file, is_converted, package_file

__all__ = [
    "BUNDLED_MODEL",
    "PAIRED",
    "BarMaker",
    "DownloadFailed",
    "ModelEntry",
    "ModelNotFound",
    "RegistryError",
    "default_model",
    "heads_for",
    "is_local",
    "paired_draft",
    "paired_heads",
    "read_registry",
    "resolve",
]

BUNDLED_MODEL = "bundled"
PAIRED = "paired"  # as the draft model or heads: those paired with the model in models.txt


def default_model() -> str:
    """The first model in models.txt whose package is installed, else the bundled one."""
    try:
        entries = read_registry()
    except RegistryError:  # ``resolve`` raises it again
        return BUNDLED_MODEL
    found = (e.name for e in entries.values() if isinstance(e.source, PackageFile) and is_local(e))
    return next(found, BUNDLED_MODEL)


def is_local(entry: ModelEntry) -> bool:
    """Whether the entry's file is on this machine."""
    match entry.source:
        case HubFile() as wanted:
            return all(cached(part) for part in wanted.parts)
        case PackageFile() as wanted:
            return is_converted(wanted) or installed_file(wanted) is not None
        case path:
            return path.is_file()


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    registry: Mapping[str, ModelEntry] | None = None,
    bar: BarMaker = terminal_bar,
) -> Path:
    """The local GGUF file for a path, a name in models.txt, an ``hf:`` source or an ``ollama:``
    model.

    Downloads a file from the hub once; later calls need no network. For a file in a package,
    returns the converted file if there is one. A model split into several files can be named by any
    of them; returns the first.
    ``bar`` makes the progress bar, by default one that shows only in a terminal.

    Raises ModelNotFound, DownloadFailed, and RegistryError if models.txt is malformed.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if path.is_file():
        return _first_part(path)
    if text.startswith("hf:"):
        return _fetch_all(parse_hub(text), bar)
    if text.startswith(OLLAMA):
        return ollama_file(text)
    entries = read_registry() if registry is None else registry
    entry = entries.get(text)
    if entry is None:
        raise _not_found(text, entries)
    match entry.source:
        case HubFile() as wanted:
            return _fetch_all(wanted, bar)
        case PackageFile() as wanted:
            return package_file(wanted)
        case path if path.is_file():
            return _first_part(path)
    raise ModelNotFound(
        f"file not found: {entry.source}, the source of {entry.name!r} in models.txt; put the file "
        f"there, correct the line, or reinstall this program if the model is a bundled one"
    )


def paired_draft(model: str | os.PathLike[str]) -> str:
    """The name of the draft model paired with a model in models.txt.

    Raises ModelNotFound if there is none.
    """
    draft: str = _paired(model, "draft", "draft model", "draft_model")
    return draft


def paired_heads(model: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of the drafting heads paired with a model in models.txt.

    Raises ModelNotFound if there are none.
    """
    heads: tuple[str, ...] = _paired(model, "heads", "drafting heads", "heads")
    return heads


def _paired(model: str | os.PathLike[str], field: str, what: str, setting: str) -> Any:
    """What ``field`` of a model's entry names."""
    entries = read_registry()
    found = getattr(entries.get(os.fspath(model)), field, None)
    if not found:
        paired = ", ".join(name for name, other in entries.items() if getattr(other, field))
        raise ModelNotFound(
            f"models.txt pairs no {what} with {os.fspath(model)!r}; give a name or path with "
            f"{{{setting}}} (models with some: {paired or 'none'})",
            settings=(setting,),
        )
    return found


def heads_for(
    model: str | os.PathLike[str], heads: Sequence[str | os.PathLike[str]]
) -> Sequence[str | os.PathLike[str]]:
    """``heads`` as given; if they are just PAIRED, those paired with the model in models.txt."""
    return paired_heads(model) if list(heads) == [PAIRED] else heads


def _fetch_all(wanted: HubFile, bar: BarMaker) -> Path:
    """Download all parts of a split file; returns the first."""
    first, *_ = [fetch(part, bar) for part in wanted.parts]
    return first


def _first_part(path: Path) -> Path:
    """The first file of the split model of ``path``, which llama.cpp opens to find the others.

    Raises ModelNotFound if a file is missing from its folder.
    """
    files = [path.with_name(name) for name in part_names(path.name)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFound(
            f"{path} is one of {len(files)} files of a model; missing from its folder: "
            f"{', '.join(missing[:3])}{more}; put all files into one folder"
        )
    return files[0]


def _not_found(text: str, entries: Mapping[str, ModelEntry]) -> ModelNotFound:
    is_folder = bool(text) and Path(text).is_dir()
    problem = f"{text} is a folder" if is_folder else f"file not found: {text or repr(text)}"
    near = " or ".join(get_close_matches(text, entries) or list(entries)[:1])
    return ModelNotFound(
        f"{problem}. Give the path of a .gguf file, hf:owner/repository/file.gguf, or a name in "
        f"models.txt{near and f', such as {near}'}"
    )
