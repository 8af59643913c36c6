"""Files attached to a message: how the model reads them, and the text of a PDF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from pypdf import PdfReader

from app.store.exports import quoted

MOST_TEXT = 1_000_000  # characters of a PDF


def with_files(text: str, files: Sequence[Mapping[str, Any]]) -> str:
    """The message as the model reads it: its text, and each file as a code block. One that
    ``leads`` comes before the text."""
    before = [quoted(file["name"], file["text"]) for file in files if file.get("leads", True)]
    after = [quoted(file["name"], file["text"]) for file in files if not file.get("leads", True)]
    return "\n\n".join(filter(None, [*before, text, *after])).strip("\n") if files else text


class UnreadableFile(Exception):
    """A file whose text cannot be read. The message is for the user."""


def text_of_pdf(name: str, data: bytes) -> str:
    """The text of a PDF, page by page. Raises UnreadableFile."""
    found, n_characters = [], 0
    try:
        for page in PdfReader(BytesIO(data)).pages:
            if n_characters > MOST_TEXT:
                break
            found.append(page.extract_text().strip())
            n_characters += len(found[-1])
    except Exception as error:  # pypdf raises almost anything over a damaged file
        raise UnreadableFile(f"{name} cannot be read as a PDF: {error}") from error
    if n_characters > MOST_TEXT:
        raise UnreadableFile(f"{name} has more than {MOST_TEXT:,} characters. Attach a part of it.")
    if not n_characters:
        raise UnreadableFile(f"{name} has no text. If its pages are pictures, paste their text.")
    return "\n\n".join(filter(None, found))


def size_of(text: str) -> str:
    """The size of a text in UTF-8, such as ``12 kB``."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes < 1000:
        return f"{n_bytes} B"
    return f"{n_bytes / 1e3:.0f} kB" if n_bytes < 999_500 else f"{n_bytes / 1e6:.1f} MB"
