"""Models that can be loaded by name: those of models.txt, and GGUF files in the hub's cache.

Also the files of the caches themselves: those that only came in part, and deleting them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from speculation.registry import (
    ModelEntry,
    ModelNotFound,
    RegistryError,
    is_local,
    read_registry,
    resolve,
)
from speculation.registry.entries import HubFile, PackageFile, parse_hub
from speculation.registry.found import OLLAMA, is_model_name, ollama_file
from speculation.registry.hub import Partial, cached, discard, partials
from speculation.registry.packages import converted_file
from speculation.system.cache_folder import cache_folder


def known_models() -> dict[str, ModelEntry]:
    """The models by name: those of models.txt, then files in the hub's cache that it lacks, which
    are named ``hf:owner/repository/file.gguf``."""
    try:
        registry = read_registry()
    except RegistryError:  # whoever loads a model hears of it
        registry = {}
    named = [entry.source for entry in registry.values()]
    others = [
        hub_entry(file) for file in _in_cache(Path(constants.HF_HUB_CACHE)) if file not in named
    ]
    return {name: one for name, one in registry.items() if not one.is_heads} | {
        one.name: one
        for one in others
        if is_local(one)  # all parts, at that branch
    }


def models_in_part() -> dict[str, ModelEntry]:
    """The models that interrupted downloads left a part of and that models.txt does not name."""
    named = [entry.source for entry in read_registry().values()]
    return {str(file): hub_entry(file) for file in parts_left() if file not in named}


def parts_left() -> dict[HubFile, Partial]:
    """What interrupted downloads left, by the model's first file."""
    return {one.wanted.parts[0]: one for one in partials()}


def hub_entry(file: HubFile, n_bytes: int = 0) -> ModelEntry:
    """The entry of a file that models.txt does not name."""
    return ModelEntry(str(file), file, None, "", n_bytes=n_bytes)


def _in_cache(folder: Path) -> Iterator[HubFile]:
    """The GGUF files in the hub's cache; of a model in several files, the first."""
    for path in sorted(folder.glob("models--*/snapshots/*/**/*.gguf")):
        repository, _, _, *names = path.relative_to(folder).parts
        owner, _, name = repository.removeprefix("models--").partition("--")
        if name and is_model_name(path.name):
            yield HubFile(f"{owner}/{name}", "/".join(names))


def entry_of(name: str) -> ModelEntry:
    """The entry of a name in models.txt, of a file of the hub, of Ollama, or of a path.

    Raises RegistryError and ModelNotFound.
    """
    if found := read_registry().get(name):
        return found
    if name.startswith("hf:"):
        return hub_entry(parse_hub(name))
    return ModelEntry(name, ollama_file(name) if name.startswith(OLLAMA) else Path(name), None, "")


def model_path(entry: ModelEntry) -> Path | None:
    """The entry's file on this machine, the first of several; None if it is not here."""
    return resolve(entry.name, registry={entry.name: entry}) if is_local(entry) else None


def files_in_cache(entry: ModelEntry) -> list[Path]:
    """The entry's files if all of them are in one of our caches, else nothing: others are not ours
    to delete."""
    match entry.source:
        case HubFile() as wanted:
            found = [path for part in wanted.parts if (path := cached(part)) is not None]
            folder = Path(constants.HF_HUB_CACHE)
        case PackageFile() as wanted if wanted.file_type is not None:
            found, folder = [converted_file(wanted)], cache_folder() / "models"
        case _:
            return []
    folder = folder.resolve()
    inside = [file for file in found if file.is_file() and file.resolve().is_relative_to(folder)]
    return inside if len(inside) == len(found) else []


def delete(entry: ModelEntry) -> int:
    """Delete the entry's files from the cache, also those that are there in part; returns the bytes
    that this frees.

    A file that another revision on this machine links to keeps its bytes. Raises ModelNotFound if
    the entry has no file in a cache, and OSError.
    """
    files, parts = files_in_cache(entry), []
    if isinstance(entry.source, HubFile):
        parts = entry.source.parts
    begun = [one for one in partials() if one.wanted in parts]
    if not files and not begun:
        raise ModelNotFound(
            f"{entry.name} has no file in the caches of this program, and others are not deleted"
        )
    n_bytes = 0
    for partial in begun:
        discard(partial)
        n_bytes += partial.done
    for file in files:
        content = file.resolve()
        size = content.stat().st_size
        file.unlink()
        if content != file:  # a link to a blob, models--…/blobs/SHA256
            links = content.parents[1].glob("snapshots/*/**/*.gguf")
            if any(link.resolve() == content for link in links):
                continue
            content.unlink()
        n_bytes += size
    return n_bytes
