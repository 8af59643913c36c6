"""Writes files in one move: another program never sees an incomplete one. Pure Python."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_WAITS = (0.01, 0.1, 0.5, 2.0)  # seconds between attempts


@contextmanager
def replacing(path: Path, *, private: bool = False, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which becomes ``path`` at the end of the block.

    Until then it has the name ``NAME.PROCESS.partial`` in the same folder. After an error, ``path``
    is what it was. A link stays, and what it points to is replaced. The new file may be read by
    those who could read the old one; by its owner alone if it is ``private``.
    ``sync`` waits until the disk has it, so that a loss of power leaves one of the two.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    kept = path.stat().st_mode if path.exists() and not private else None
    mode = 0o666 if kept is None and not private else 0o600
    partial.unlink(missing_ok=True)  # one that was left may be open to all
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if kept is not None:
            partial.chmod(stat.S_IMODE(kept))
        _rename(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _rename(partial: Path, path: Path) -> None:
    """Retries, because on Windows any open reader blocks the rename: an editor, or a virus scanner
    right after a write."""
    for wait in _WAITS:
        with suppress(PermissionError):
            partial.replace(path)
            return
        time.sleep(wait)
    partial.replace(path)
