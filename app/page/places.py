"""Where models are on this machine: what was loaded by path, added folders, other programs'.

Searching them takes seconds, so a thread does it, and keeps what it found.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from app.api.errors import ApiError
from app.page.kept import KeptFile
from batching.errors import SpeculationError
from speculation.registry import ModelEntry
from speculation.registry.found import (
    MOST_FOUND,
    is_model_name,
    ollama_models,
    search,
    usual_folders,
)
from speculation.registry.local import entry_of, model_path
from speculation.registry.vocabulary import Vocabulary, vocabulary_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 20.0  # between two searches
_MOST_RECENT = 20
_MOST_LISTED = 2000  # of a folder


@dataclass
class _Kept:
    """recent: what was loaded by path or as ``hf:…``, the last one first; folders: added ones."""

    recent: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


class Places:
    """May be used by several threads.

    vocabularies  of the files that were looked at
    """

    def __init__(self, file: Path) -> None:
        """``file`` keeps the paths and the folders."""
        self._file, self._lock = KeptFile(file, _Kept), Lock()
        self._found: dict[str, ModelEntry] = {}
        self._looked = -LOOK_SECONDS
        self._is_looking = False
        self._beside: set[Path] = set()  # folders of models that were loaded
        self.vocabularies: dict[Path, Vocabulary] = {}

    def kept(self) -> _Kept:
        return self._file.read()

    def change(self, name: str, value: str, *, keeps: bool = True) -> None:
        """Add a value in front of ``recent`` or ``folders``, or remove it."""
        with self._lock:
            kept = self.kept()
            others = [one for one in getattr(kept, name) if one != value]
            setattr(kept, name, ([value] if keeps else []) + others[: _MOST_RECENT - 1])
            self._looked = -LOOK_SECONDS
            self._file.write(kept)

    def entries(self) -> dict[str, ModelEntry]:
        """What was loaded before, then what was found."""
        recent: dict[str, ModelEntry] = {}
        for name in self.kept().recent:
            with suppress(SpeculationError):
                recent[name] = entry_of(name)
        return {**recent, **self._found}

    def look(
        self,
        known: Callable[[], Iterable[ModelEntry]],
        beside: Sequence[Path],
        on_news: Callable[[], Any],
    ) -> None:
        """Search in a thread, also in the folders ``beside``, unless that was done lately.

        ``on_news`` is called in it if there is another model than before; ``known`` are the models
        whose vocabularies are read, too.
        """
        with self._lock:
            is_new = not self._beside.issuperset(beside)
            is_old = time.monotonic() - self._looked >= LOOK_SECONDS
            if self._is_looking or not (is_new or is_old):
                return
            self._is_looking, self._looked = True, time.monotonic()
            self._beside.update(beside)

        def run() -> None:
            try:
                before = self._found.keys(), self.vocabularies
                self._search(known())
                if before != (self._found.keys(), self.vocabularies):
                    on_news()
            except Exception:
                log.exception("the search for models failed")
            finally:
                self._is_looking = False

        Thread(target=run, name="look", daemon=True).start()

    def _search(self, known: Iterable[ModelEntry]) -> None:
        kept, vocabularies = self.kept(), dict[Path, Vocabulary]()
        seen = set()
        for entry in known:
            with suppress(SpeculationError, OSError):
                if path := model_path(entry):
                    seen.add(path.resolve())
                    vocabularies[path] = vocabulary_of(path)
        recent = {Path(one).parent for one in kept.recent if Path(one).is_absolute()}
        files = search([*map(Path, kept.folders), *usual_folders()], recent | self._beside)
        found = {}
        for name in islice([*ollama_models(), *map(str, files)], MOST_FOUND):
            with suppress(SpeculationError, OSError):
                entry = entry_of(name)
                assert isinstance(entry.source, Path)
                own = vocabulary_of(entry.source)
                if own.n and entry.source.resolve() not in seen:
                    seen.add(entry.source.resolve())
                    found[name], vocabularies[entry.source] = entry, own
        self._found, self.vocabularies = found, vocabularies


def browse(folder: str) -> dict[str, Any]:
    """The folders and models in a folder; without a name, the user's own. Raises ApiError."""
    path, folders, files = Path(folder or "~"), [], []
    try:
        path = path.expanduser().absolute()
        with os.scandir(path) as entries:
            for entry in islice(entries, _MOST_LISTED):
                if not entry.name.isprintable() or entry.name.startswith("."):
                    continue
                if Path(entry.path).is_dir():
                    folders.append({"name": entry.name, "path": entry.path})
                elif is_model_name(entry.name) and Path(entry.path).is_file():
                    size = entry.stat().st_size
                    files.append({"name": entry.name, "path": entry.path, "n_bytes": size})
    except (OSError, ValueError, RuntimeError) as error:  # the last: there is no such user
        why = getattr(error, "strerror", None) or error
        raise ApiError(f"cannot look into {str(path)!r:.300}: {why}", 404, param="folder") from None
    for found in (folders, files):
        found.sort(key=lambda one: str(one["name"]).lower())
    return {"folder": str(path), "parent": str(path.parent), "folders": folders, "files": files}
