"""Text files of a message: how they are read."""

from __future__ import annotations

import pytest

from app.page.files import size_of, with_files

FOX = {"name": "fox.txt", "text": "The fox.\nThe hen.", "leads": True}
HEN = {"name": "hen.md", "text": "```\nhen()\n```", "leads": False}
FOX_READ = "fox.txt:\n```\nThe fox.\nThe hen.\n```"
HEN_READ = "hen.md:\n````\n```\nhen()\n```\n````"


def test_the_model_reads_files_as_code_blocks_before_or_after_the_text() -> None:
    assert with_files("  Well?", ()) == "  Well?"
    assert with_files("Well?", (FOX,)) == f"{FOX_READ}\n\nWell?"
    assert with_files("Well?", (HEN,)) == f"Well?\n\n{HEN_READ}"
    assert with_files("Well?", (HEN, FOX)) == f"{FOX_READ}\n\nWell?\n\n{HEN_READ}"
    assert with_files("", (FOX, HEN)) == f"{FOX_READ}\n\n{HEN_READ}"


@pytest.mark.parametrize(
    ("n", "shown"), [(999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")]
)
def test_sizes_count_utf_8_bytes(n: int, shown: str) -> None:
    assert size_of("x" * n) == shown
    assert size_of("é" * 3) == "6 B"
