"""Files attached to a message, as the model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.store.exports import quoted


def with_files(text: str, files: Sequence[Mapping[str, Any]]) -> str:
    """The message as the model reads it: its text, and each file as a code block. One that
    ``leads`` comes before the text."""
    before = [quoted(file["name"], file["text"]) for file in files if file.get("leads", True)]
    after = [quoted(file["name"], file["text"]) for file in files if not file.get("leads", True)]
    return "\n\n".join(filter(None, [*before, text, *after])).strip("\n") if files else text


def size_of(text: str) -> str:
    """The size of a text in UTF-8, such as ``12 kB``."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes < 1000:
        return f"{n_bytes} B"
    return f"{n_bytes / 1e3:.0f} kB" if n_bytes < 999_500 else f"{n_bytes / 1e6:.1f} MB"
