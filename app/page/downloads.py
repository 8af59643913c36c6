"""Downloads and conversions of models as jobs of the server: one at a time, in a thread.

A download that is paused keeps the part it has; the registry resumes and verifies it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batching.errors import SpeculationError
from speculation.registry import resolve
from speculation.registry.conversion import converted_path

WAITING, RUNNING, PAUSED, FAILED, DONE = "waiting", "running", "paused", "failed", "done"
_LAST = (PAUSED, FAILED, DONE)  # nothing more happens to it


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


class Transfers:
    """All of them by name, since the server started. ``tell`` is called with each change, in the
    thread that makes it."""

    def __init__(self, tell: Callable[[Transfer], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._known: dict[str, Transfer] = {}
        self._waiting: deque[tuple[str, Path | None]] = deque()
        self._has_thread = False
        self._converting: subprocess.Popen[str] | None = None

    def known(self) -> dict[str, Transfer]:
        with self._lock:
            return dict(self._known)

    def download(self, name: str) -> None:
        """Start or resume a download, after those before it."""
        self._start(Transfer(name, WAITING), None)

    def convert(self, name: str, source: Path, file_type: str) -> None:
        """Start the conversion of a model's file."""
        self._start(Transfer(name, WAITING, file_type=file_type), source)

    def pause(self, name: str) -> None:
        """Pause a download; end a conversion, of which nothing is kept."""
        with self._lock:
            found = self._known.get(name)
            if found is None or found.state in _LAST:
                return
            self._known[name] = found = replace(found, state=PAUSED)
            self._waiting = deque(one for one in self._waiting if one[0] != name)
            if found.file_type and self._converting is not None:
                self._converting.terminate()
        self._tell(found)

    def forget(self, name: str) -> None:
        """Forget what came of a transfer."""
        with self._lock:
            found = self._known.get(name)
            if found is not None and found.state in _LAST:
                del self._known[name]

    def _start(self, transfer: Transfer, source: Path | None) -> None:
        with self._lock:
            before = self._known.get(transfer.name)
            if before is not None and before.state not in _LAST:
                return
            if before is not None and before.state == PAUSED and not transfer.file_type:
                transfer = replace(transfer, done=before.done, total=before.total)
            self._known[transfer.name] = transfer
            self._waiting.append((transfer.name, source))
            starts, self._has_thread = not self._has_thread, True
        self._tell(transfer)
        if starts:
            threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._has_thread = False
                    return
                name, source = self._waiting.popleft()
            with suppress(_Paused):
                self._transfer(name, source)

    def _transfer(self, name: str, source: Path | None) -> None:
        try:
            self._change(name, state=RUNNING)
            if source is None:
                resolve(name, bar=lambda **given: _Bar(self, name, int(given["total"] or 0)))
            else:
                self._convert(name, source)
            self._change(name, state=DONE)
        except _Paused:
            raise
        except (SpeculationError, OSError) as error:
            self._change(name, state=FAILED, error=str(error))
        except Exception as error:  # the next one must still run
            reason = f"unexpected {type(error).__name__}: {error}"
            self._change(name, state=FAILED, error=reason)

    def _convert(self, name: str, source: Path) -> None:
        """Convert in a process of its own, which llama.cpp may end."""
        file_type = self._known[name].file_type
        target = converted_path(source, file_type)
        target.parent.mkdir(parents=True, exist_ok=True)
        module = "speculation.registry.conversion"
        command = [sys.executable, "-m", module, str(source), str(target), file_type]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            self._converting = process
            try:
                _, told = process.communicate()
            finally:
                self._converting = None
        if process.returncode:
            for part in target.parent.glob(f"{target.name}.*.part"):
                part.unlink(missing_ok=True)
            self._check(name)
            reason = (told.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
            raise OSError(f"The conversion failed: {reason}")

    def _check(self, name: str) -> None:
        if self._known[name].state == PAUSED:
            raise _Paused

    def _change(self, name: str, **fields: Any) -> None:
        """Publish a change. Raises _Paused if the user has paused it meanwhile."""
        with self._lock:
            self._check(name)
            self._known[name] = changed = replace(self._known[name], **fields)
        self._tell(changed)

    def advance(self, name: str, done: int, total: int) -> None:
        """A download has come so far. Raises _Paused."""
        self._check(name)
        before = self._known[name]
        permille = total // 1000 or 1
        if before.total != total or done // permille != before.done // permille or done == total:
            self._change(name, state=RUNNING, done=done, total=total)


class _Bar:
    """A file's progress bar, as the registry wants it."""

    def __init__(self, transfers: Transfers, name: str, total: int) -> None:
        self._transfers, self._name, self._total, self._done = transfers, name, total, 0

    def update(self, n: float, /) -> None:
        self._done += int(n)
        self._transfers.advance(self._name, self._done, self._total)

    def close(self) -> None:
        pass
