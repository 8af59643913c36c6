"""What the page is told of the model and of its load."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.page.feed import Feed
from app.worker.backend import Backend
from app.worker.messages import Status
from batching.errors import SpeculationError
from speculation.registry import RegistryError, read_registry
from speculation.registry.describe import describe
from speculation.registry.entries import title_of

LOOK_SECONDS = 0.5  # between looks at the backend's status
Json = dict[str, Any]


class StatusNews:
    """Publishes the backend's status when it has changed."""

    def __init__(self, backend: Backend, feed: Feed) -> None:
        self._backend, self._feed = backend, feed
        self._seen, self._told = Status(None), status_json(Status(None), None)
        self._watching: asyncio.Task[None] | None = None

    def told(self) -> Json:
        """What is told of the status; published if it has changed, whoever asks first."""
        if (now := self._backend.status()) != self._seen:
            # models.txt is not read at each change.
            is_same = (now.model, now.facts) == (self._seen.model, self._seen.facts)
            self._told = status_json(now, self._told["model"] if is_same else model_json(now))
            self._seen = now
            self._feed.publish(None, "status", self._told)
        return self._told

    def watch(self) -> None:
        """Look for changes from now on. Idempotent."""
        self._watching = self._watching or asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            self.told()
            await asyncio.sleep(LOOK_SECONDS)


def status_json(status: Status, model: Json | None) -> Json:
    loading = status.loading
    return {
        "model": model,
        "loading": loading and {**asdict(loading), "title": title_of(loading.model)},
        "error": status.error,
        "failed": status.failed,
        "is_down": status.is_down,
    }


def model_json(status: Status) -> Json | None:
    """The loaded model; ``missing`` are the methods that cannot run, what each needs, and the names
    that models.txt has for it."""
    model = status.model
    if model is None:
        return None
    try:
        entries = read_registry()
    except RegistryError:  # whoever loads a model hears of it
        entries = {}
    entry = entries.get(model.spec.model)

    def offer(method: str, setting: str) -> list[str]:
        if entry is None:
            return []
        if setting == "heads":
            return [name for name in entry.heads if method in entries[name].methods]
        return [entry.draft] if setting == "draft_model" and entry.draft else []

    missing = {
        method: {"setting": setting, "offer": offer(method, setting)}
        for method, setting in status.facts.missing.items()
    }
    facts = ""
    with suppress(SpeculationError, OSError, ValueError):  # ValueError: the path is empty
        facts = str(describe(Path(status.facts.path)))
    return {
        **asdict(model),
        "name": title_of(model.spec.model),
        "facts": facts,
        "about": entry.description if entry is not None else "",
        "n_threads": status.facts.n_threads,
        "gpu_layers": status.facts.gpu_layers,
        "missing": missing,
    }
