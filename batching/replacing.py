"""Writes files in one move: another program never sees an incomplete one. Pure Python."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_WAITS = (0.01, 0.1, 0.5, 2.0)  # seconds between attempts


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes ``path`` at the end of the block.

    Until then it has the name ``NAME.partial`` in the same folder. After an error, ``path`` is what
    it was. A link stays, and what it points to is replaced.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
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
