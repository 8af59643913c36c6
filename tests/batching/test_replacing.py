"""Files written in one move: who may read them, and what is left after an error."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from batching.replacing import replacing


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_file_stays_as_open_as_it_was_and_a_private_one_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for old, private, new in (
            (None, False, 0o644),
            (None, True, 0o600),
            (0o640, False, 0o640),
            (0o600, False, 0o600),
            (0o644, True, 0o600),
        ):
            path = tmp_path / "file"
            path.unlink(missing_ok=True)
            if old is not None:
                path.touch()
                path.chmod(old)
            with replacing(path, private=private) as file:
                (partial,) = tmp_path.glob("*.partial")
                assert mode_of(partial) in (0o600, new)
                file.write(b"x")
            assert (mode_of(path), path.read_bytes()) == (new, b"x")
    finally:
        os.umask(before)


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"), replacing(path) as file:
        file.write(b"new")
        raise OSError(errno.ENOSPC, "No space left")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
