"""Checks of input and output files: writable, distinct, UTF-8; their digests and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from batching.errors import InvalidParameter

_CHUNK = 2**20


def require_writable(path: Path) -> None:
    """Check that an output file can be written, before the work that produces it.

    Output is written to a file beside it, which then takes its name. Raises InvalidParameter with
    the reason.
    """
    partial = path.with_name(f"{path.name}.partial")
    if path.is_dir():
        reason = "it is a folder"
    elif not path.absolute().parent.is_dir():
        reason = "no such folder"
    elif path.exists() and not path.is_file():
        reason = "it is a device, not a file"
    else:
        try:
            existed = partial.exists()
            partial.open("ab").close()
            if not existed:
                partial.unlink()
            return
        except OSError as error:
            reason = f"{error.strerror} ({partial})"
    raise InvalidParameter(
        f"cannot write {path}: {reason}; give a file in a folder that exists and is writable"
    )


def require_distinct(path: Path, files: Iterable[Path]) -> None:
    """Check that the output ``path`` is none of the input ``files``. Raises InvalidParameter."""
    for file in files:
        if path.resolve() == file.resolve():
            raise InvalidParameter(
                f"cannot write {path}: it is one of the input files; give another name"
            )


def read_text(file: Path) -> str:
    """The content of a text file. Raises InvalidParameter if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None


def not_utf8(file: Path, error: UnicodeDecodeError) -> InvalidParameter:
    """The error for a file that is not UTF-8 text."""
    return InvalidParameter(
        f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); give text files in UTF-8"
    )


def sha256(file: Path) -> str:
    """The file's SHA-256 in hex digits."""
    found = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def digest(file: Path) -> str:
    """The first 16 hex digits of the file's SHA-256."""
    return sha256(file)[:16]


def in_words(n_bytes: int) -> str:
    """A size as the Hub and the page's ``inSize`` write it: ``1.2 GB``, ``340 MB``."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= 0.9995 * one:
            return f"{n_bytes / one:.{1 if one >= 1e6 and n_bytes < 100 * one else 0}f} {unit}"
    return f"{n_bytes} B"
