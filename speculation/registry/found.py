"""Finds the GGUF files that other programs keep on this machine: LM Studio, Ollama, llama.cpp.

Folders may hold anything: links, a million files, names that are no text. So a search ends after so
many files and seconds, and follows no link to a folder.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from platformdirs import user_cache_path

from batching.gguf.splits import part_names
from speculation.registry.entries import ModelNotFound

COMPANIONS = ("mmproj", "imatrix")  # in the names of files that are no models
OLLAMA = "ollama:"  # begins the names of Ollama's models, whose files are named by their content
MOST_FOUND = 200
_MOST_ENTRIES = 50_000  # that are looked at
_SECONDS = 10.0
_DEPTH = 5  # of folders within a folder
_MANIFEST_BYTES = 2**20
_USUAL = ("registry.ollama.ai", "library")  # host and owner of models that name none
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def usual_folders() -> list[Path]:
    """Where LM Studio and llama.cpp keep their models."""
    home, own = Path.home(), os.environ.get("LLAMA_CACHE")
    llama = user_cache_path("llama.cpp", appauthor=False, opinion=False)
    return [
        home / ".lmstudio" / "models",
        home / ".cache" / "lm-studio" / "models",
        Path(own) if own else llama,
    ]


def search(folders: Iterable[Path], beside: Iterable[Path] = ()) -> Iterator[Path]:
    """The models in ``folders`` and the folders in them, and in ``beside`` alone: GGUF files, of
    several the first."""
    left = deque([(one, 0) for one in beside] + [(one, _DEPTH) for one in folders])
    end, n_left = time.monotonic() + _SECONDS, _MOST_ENTRIES
    while left and n_left > 0:
        folder, depth = left.popleft()
        try:
            with os.scandir(folder) as entries:
                for entry in islice(entries, n_left):
                    n_left -= 1
                    if time.monotonic() > end:
                        return
                    name = entry.name
                    if not name.isprintable():  # half a character has no form in JSON
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if depth and not name.startswith("."):
                            left.append((Path(entry.path), depth - 1))
                    elif is_model_name(name) and Path(entry.path).is_file():  # no link to itself
                        yield Path(entry.path)
        except OSError:  # it is not there, or may not be read
            continue


def is_model_name(name: str) -> bool:
    return (
        name.endswith(".gguf")
        and name == part_names(name)[0]
        and not any(word in name for word in COMPANIONS)
    )


def _ollama() -> Path:
    own = os.environ.get("OLLAMA_MODELS")
    return Path(own) if own else Path.home() / ".ollama" / "models"


def ollama_models() -> Iterator[str]:
    """The names of Ollama's models, such as ``ollama:model:tag`` or ``ollama:owner/model:tag``."""
    for path in islice((_ollama() / "manifests").glob("*/*/*/*"), MOST_FOUND):
        *where, tag = path.parts[-4:]
        name = "/".join(where).removeprefix(f"{_USUAL[0]}/").removeprefix(f"{_USUAL[1]}/")
        if name.isprintable() and tag.isprintable() and path.is_file():
            yield f"{OLLAMA}{name}:{tag}"


def ollama_file(name: str) -> Path:
    """The GGUF of one of Ollama's models, which its manifest names. Raises ModelNotFound."""
    where, _, tag = name.removeprefix(OLLAMA).rpartition(":")
    names = where.split("/")
    parts = [*_USUAL[: 3 - len(names)], *names, tag]
    try:
        if (
            len(parts) != 4
            or not {"", ".", ".."}.isdisjoint(parts)
            or any("\\" in part for part in parts)
        ):
            raise ValueError
        with (_ollama() / "manifests").joinpath(*parts).open("rb") as file:
            layers = json.loads(file.read(_MANIFEST_BYTES))["layers"]
        (digest,) = [str(one["digest"]) for one in layers if one["mediaType"].endswith(".model")]
        if _DIGEST.fullmatch(digest):
            return _ollama() / "blobs" / digest.replace(":", "-")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise ModelNotFound(f"Ollama has no model {name!r:.200} here; `ollama list` names its models")
