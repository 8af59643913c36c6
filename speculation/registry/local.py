"""Models that can be loaded by name: those of models.txt, and GGUF files in the hub's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from batching.gguf.splits import part_names
from speculation.registry import ModelEntry, RegistryError, is_local, read_registry
from speculation.registry.entries import HubFile

_COMPANIONS = ("mmproj", "imatrix")  # in the names of files that are no models


def known_models() -> dict[str, ModelEntry]:
    """The models by name: those of models.txt, then files in the hub's cache that it lacks, which
    are named ``hf:owner/repository/file.gguf``."""
    try:
        found = {name: e for name, e in read_registry().items() if not e.is_heads}
    except RegistryError:  # whoever loads a model hears of it
        found = {}
    named = [entry.source for entry in found.values()]
    for file in _in_cache(Path(constants.HF_HUB_CACHE)):
        if file not in named:
            name = f"hf:{file.repo}/{file.path}"
            entry = ModelEntry(name, file, None, "")
            if is_local(entry):  # all parts, at the branch that the name stands for
                found[name] = entry
    return found


def _in_cache(folder: Path) -> Iterator[HubFile]:
    """The GGUF files in the hub's cache; of a model in several files, the first."""
    for path in sorted(folder.glob("models--*/snapshots/*/**/*.gguf")):
        repository, _, _, *names = path.relative_to(folder).parts
        owner, _, name = repository.removeprefix("models--").partition("--")
        is_model = not any(word in path.name for word in _COMPANIONS)
        if name and is_model and path.name == part_names(path.name)[0]:
            yield HubFile(f"{owner}/{name}", "/".join(names))
