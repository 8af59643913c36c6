"""Downloads of models as jobs of the server: one at a time, each in a thread.

What a paused or failed download leaves is a file of the registry's, which resumes and verifies it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from batching.errors import SpeculationError
from speculation.registry import resolve

WAITING, RUNNING, PAUSED, FAILED, DONE = "waiting", "running", "paused", "failed", "done"


@dataclass(frozen=True)
class Download:
    """A model's download. ``done`` and ``total`` are bytes; ``error`` says why it failed, and what
    to do."""

    name: str
    state: str
    done: int = 0
    total: int = 0
    error: str = ""


class _Paused(Exception):
    """Raised within a download to end it."""


class Downloads:
    """Those that wait, run or failed, by name. ``tell`` is called with each change, in the thread
    that makes it; those that were paused or are done are only told."""

    def __init__(self, tell: Callable[[Download], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of the one that runs
        self._known: dict[str, _Job] = {}

    def known(self) -> dict[str, Download]:
        with self._lock:
            return {name: job.now for name, job in self._known.items()}

    def start(self, name: str) -> None:
        """Start or resume a download, after those before it."""
        job = _Job(self, Download(name, WAITING))
        self.forget(name)
        with self._lock:
            if name in self._known:
                return
            self._known[name] = job
        self._tell(job.now)
        threading.Thread(target=self._run, args=[job], name="download", daemon=True).start()

    def pause(self, name: str) -> None:
        with self._lock:
            job = self._known.get(name)
            if job is None or job.now.state == FAILED:
                return
            del self._known[name]
        self._tell(replace(job.now, state=PAUSED))

    def forget(self, name: str) -> None:
        """Forget why a download failed."""
        with self._lock:
            if name in self._known and self._known[name].now.state == FAILED:
                del self._known[name]

    def _run(self, job: _Job) -> None:
        with suppress(_Paused), self._turn:
            self.change(job, state=RUNNING)
            try:
                resolve(job.now.name, bar=job.bar)
            except (SpeculationError, OSError) as error:
                self.change(job, state=FAILED, error=str(error))
            else:
                self.change(job, state=DONE)

    def change(self, job: _Job, **fields: Any) -> None:
        """Publish a change. Raises _Paused if the user has paused it meanwhile."""
        name = job.now.name
        with self._lock:
            if self._known.get(name) is not job:
                raise _Paused
            job.now = replace(job.now, **fields)
            if job.now.state == DONE:
                del self._known[name]
        self._tell(job.now)


class _Job:
    """A download, and its progress bar as the registry wants it."""

    def __init__(self, downloads: Downloads, now: Download) -> None:
        self.now = now
        self._downloads = downloads
        self._done = self._total = 0

    def bar(self, **given: Any) -> _Job:
        self._done, self._total = 0, int(given["total"] or 0)
        return self

    def update(self, n: float, /) -> None:
        """Tell each thousandth part. Raises _Paused."""
        before, one = self._done, self._total // 1000 or 1
        self._done += int(n)
        is_news = self.now.total != self._total or self._done // one != before // one
        if is_news or self._done == self._total:
            self._downloads.change(self, done=self._done, total=self._total)

    def close(self) -> None:
        pass
