"""Output to consoles and pipes that cannot encode every character."""

from __future__ import annotations

import io
import sys

import pytest

from speculation.system.console import replace_unencodable


def test_characters_a_pipe_cannot_encode_become_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    replace_unencodable()
    print("1.5 × of ж", flush=True)
    assert pipe.buffer.getvalue() == b"1.5 \xd7 of ?\n"
