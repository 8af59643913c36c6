"""Downloads and conversions of models as jobs of the server: one at a time, each in a thread.

What a paused or failed download leaves is a file of the registry's, which resumes and verifies it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batching.errors import SpeculationError
from speculation.registry import resolve
from speculation.registry.conversion import converted_path

WAITING, RUNNING, PAUSED, FAILED, DONE = "waiting", "running", "paused", "failed", "done"


@dataclass(frozen=True)
class Transfer:
    """A model's download, or its conversion to ``file_type``.

    done, total  in bytes; a conversion does not tell them
    error        why it failed, and what to do
    """

    name: str
    state: str
    done: int = 0
    total: int = 0
    error: str = ""
    file_type: str = ""


class _Paused(Exception):
    """Raised within a download to end it."""


@dataclass
class _Job:
    transfer: Transfer
    source: Path | None  # of a conversion
    is_paused: bool = False
    process: subprocess.Popen[str] | None = None


class Transfers:
    """Those that wait, run or failed, by name. ``tell`` is called with each change, in the thread
    that makes it; those that were paused or are done are only told."""

    def __init__(self, tell: Callable[[Transfer], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of the one that runs
        self._jobs: dict[str, _Job] = {}

    def known(self) -> dict[str, Transfer]:
        with self._lock:
            return {name: job.transfer for name, job in self._jobs.items()}

    def download(self, name: str) -> None:
        """Start or resume a download, after those before it."""
        self._start(_Job(Transfer(name, WAITING), None))

    def convert(self, name: str, source: Path, file_type: str) -> None:
        """Start the conversion of a model's file."""
        self._start(_Job(Transfer(name, WAITING, file_type=file_type), source))

    def pause(self, name: str) -> None:
        """Pause a download; end a conversion, of which nothing is kept."""
        with self._lock:
            job = self._jobs.get(name)
            if job is None or job.transfer.state == FAILED:
                return
            del self._jobs[name]
            job.is_paused = True
            if job.process is not None:
                job.process.terminate()
        self._tell(replace(job.transfer, state=PAUSED))

    def forget(self, name: str) -> None:
        """Forget why a transfer failed."""
        with self._lock:
            if name in self._jobs and self._jobs[name].transfer.state == FAILED:
                del self._jobs[name]

    def _start(self, job: _Job) -> None:
        name = job.transfer.name
        self.forget(name)
        with self._lock:
            if name in self._jobs:
                return
            self._jobs[name] = job
        self._tell(job.transfer)
        threading.Thread(target=self._run, args=[job], name="transfer", daemon=True).start()

    def _run(self, job: _Job) -> None:
        with suppress(_Paused), self._turn:
            self._change(job, state=RUNNING)
            try:
                if job.source is None:
                    name = job.transfer.name
                    resolve(name, bar=lambda **given: _Bar(self, job, int(given["total"] or 0)))
                else:
                    self._convert(job, job.source)
            except (SpeculationError, OSError) as error:
                self._change(job, state=FAILED, error=str(error))
            else:
                self._change(job, state=DONE)

    def _convert(self, job: _Job, source: Path) -> None:
        """Convert in a process of its own, which llama.cpp may end."""
        file_type = job.transfer.file_type
        target = converted_path(source, file_type)
        target.parent.mkdir(parents=True, exist_ok=True)
        module = "speculation.registry.conversion"
        command = [sys.executable, "-m", module, str(source), str(target), file_type]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            job.process = process
            if job.is_paused:
                process.terminate()
            _, told = process.communicate()
        if process.returncode:
            for part in target.parent.glob(f"{target.name}.*.partial"):
                part.unlink(missing_ok=True)
            reason = (told.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
            raise OSError(f"The conversion failed: {reason}")

    def _change(self, job: _Job, **fields: Any) -> None:
        """Publish a change. Raises _Paused if the user has paused it meanwhile."""
        with self._lock:
            if job.is_paused:
                raise _Paused
            job.transfer = replace(job.transfer, **fields)
            if job.transfer.state == DONE:
                del self._jobs[job.transfer.name]
        self._tell(job.transfer)

    def advance(self, job: _Job, done: int, total: int) -> None:
        """A download has come so far. Raises _Paused."""
        before, permille = job.transfer, total // 1000 or 1
        is_news = before.total != total or done // permille != before.done // permille
        if is_news or done == total or job.is_paused:
            self._change(job, done=done, total=total)


class _Bar:
    """A file's progress bar, as the registry wants it."""

    def __init__(self, transfers: Transfers, job: _Job, total: int) -> None:
        self._transfers, self._job, self._total, self._done = transfers, job, total, 0

    def update(self, n: float, /) -> None:
        self._done += int(n)
        self._transfers.advance(self._job, self._done, self._total)

    def close(self) -> None:
        pass
