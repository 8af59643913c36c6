"""Files that tools are given: whether one can be written, and what identifies or spoils one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from batching.errors import InvalidParameter

_CHUNK = 2**20


def obstacle(path: Path) -> str:
    """Why no file can be put in the place of ``path``, or nothing."""
    if path.is_dir():
        return "it is a folder"
    if not path.absolute().parent.is_dir():
        return "no such folder"
    if path.exists() and not path.is_file():
        return "it is a device, and the file is replaced as a whole"
    return ""


def require_writable(path: Path) -> None:
    """Find out before the work whether its file can be written, not after.

    Files are written beside their place, as ``NAME.partial``, and renamed. Raises InvalidParameter
    with the reason.
    """
    reason = obstacle(path)
    if not reason:
        partial = path.with_name(f"{path.name}.partial")
        try:
            was_there = partial.exists()
            partial.open("ab").close()
            if not was_there:
                partial.unlink()
        except OSError as error:
            reason = f"{error.strerror} ({partial})"
    if reason:
        raise InvalidParameter(
            f"cannot write {path}: {reason}; give a file in a folder that exists and can be "
            f"written to"
        )


def require_other(path: Path, files: Iterable[Path]) -> None:
    """Refuse to write over what is read. Raises InvalidParameter with its name."""
    for file in files:
        if path.resolve() == file.resolve():
            raise InvalidParameter(
                f"cannot write {path}: it is one of the files that are read; give another name"
            )


def read_text(file: Path) -> str:
    """A whole text. Raises InvalidParameter where it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None


def not_utf8(file: Path, error: UnicodeDecodeError) -> InvalidParameter:
    """The error for a file that is something else than text."""
    return InvalidParameter(
        f"{file} is no UTF-8 text ({error.reason} at byte {error.start}); give text files, in UTF-8"
    )


def digest(file: Path) -> str:
    """Tells whether a file is byte for byte the same: 16 digits of its SHA-256."""
    found = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()[:16]
