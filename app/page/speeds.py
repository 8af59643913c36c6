"""How fast each model was on this machine, learnt from its replies and kept in the cache folder.

Per model: tokens and seconds of prompts, of plain decoding and of ``auto``. What another device or
build computed is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from app.page.kept import KeptFile
from app.worker.backend import Backend
from app.worker.messages import Done
from speculation.drafter import BASELINE
from speculation.system.cache_folder import cache_folder

LEAST_TOKENS = 32  # of one reply; fewer say little
MOST_SECONDS = 60.0  # older replies count for less beyond
AUTO = "auto"


@dataclass
class _Measured:
    """Of a model, as ``by`` computed it: tokens and seconds by kind."""

    by: str
    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)


class Speeds:
    """The speeds by model. May be used by several threads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = Lock()

    def of(self, path: Path) -> dict[str, float]:
        """Tokens per second of a model's file: ``prompt``, ``plain`` and ``auto``, if known."""
        found = _file().read().get(_key(path))
        kinds = {} if found is None else found.kinds
        return {kind: round(n / seconds, 1) for kind, (n, seconds) in kinds.items() if seconds > 0}

    def take(self, done: Done) -> None:
        """Learn from the end of a reply that ran alone."""
        status = self._backend.status()
        if done.model is None or status.model != done.model or not status.facts.path:
            return
        name = {BASELINE: "plain", AUTO: AUTO}.get(done.method)
        n_decoded = done.n_tokens - done.n_first
        news = {}
        if (n_read := done.n_prompt - done.n_reused) >= LEAST_TOKENS:
            news["prompt"] = n_read, done.prefill_seconds
        if name is not None and n_decoded >= LEAST_TOKENS:
            news[name] = n_decoded, done.decode_seconds
        if not news:
            return
        key = _key(Path(status.facts.path))
        with self._lock:
            everything = _file().read()
            kept = everything.get(key)
            if kept is None or kept.by != done.model.computed_by:
                kept = everything[key] = _Measured(done.model.computed_by)
            for kind, (n, seconds) in news.items():
                kept.kinds[kind] = _added(kept.kinds.get(kind, (0.0, 0.0)), n, seconds)
            _file().write(everything)


def _added(kept: tuple[float, float], n: int, seconds: float) -> tuple[float, float]:
    """The tokens and seconds with those of one more reply."""
    total = kept[0] + n, kept[1] + seconds
    factor = min(1.0, MOST_SECONDS / total[1]) if total[1] else 1.0
    return total[0] * factor, total[1] * factor


def _file() -> KeptFile[dict[str, _Measured]]:
    return KeptFile(cache_folder() / "speeds.json", dict[str, _Measured])


def _key(path: Path) -> str:
    try:
        return f"{path.name} {path.stat().st_size}"
    except OSError:
        return path.name
