"""Files that commands read and write, and output that cannot encode every character."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from speculation.system.console import replace_unencodable
from speculation.system.files import digest, require_writable


def test_a_path_that_cannot_be_written_is_refused_and_no_file_left(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "h.gguf", "no such folder"),
        (tmp_path / ("x" * 250), "File name too long"),
    ):
        with pytest.raises(InvalidParameter, match=f"{reason}.*; give a file in a folder that"):
            require_writable(path)
    require_writable(tmp_path / "h.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="there is no /dev/null")
def test_a_device_is_not_replaced() -> None:
    with pytest.raises(InvalidParameter, match="cannot write /dev/null: it is a device"):
        require_writable(Path("/dev/null"))


def test_data_files_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(b"abc")
    assert digest(file) == "ba7816bf8f01cfea"
    file.write_bytes(b"abd")
    assert digest(file) == "a52d159f262b2c6d"


def test_characters_a_pipe_cannot_encode_become_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    replace_unencodable()
    print("1.5 × of ж", flush=True)
    assert pipe.buffer.getvalue() == b"1.5 \xd7 of ?\n"
