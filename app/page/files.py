"""Files attached to a message: how the model reads them and how the browser sends them.

Knows nothing of conversations, Gradio or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from pypdf import PdfReader

MOST_TEXT = 1_000_000  # characters of a PDF
_FENCES = re.compile("`{3,}")


@dataclass(frozen=True)
class File:
    """A text file attached to a message. It ``leads`` if it comes before the message's text."""

    name: str
    text: str
    leads: bool = True


def with_files(text: str, files: Sequence[File]) -> str:
    """The message as the model reads it: its text, and each file as a code block."""
    before = "".join(_quoted(file) for file in files if file.leads)
    after = "".join(_quoted(file) for file in files if not file.leads)
    body = f"{text}\n\n" if text and after else text
    return f"{before}{body}{after}".strip("\n") if files else text


def _quoted(file: File) -> str:
    """The file's name and a code block whose fence is longer than any in its text."""
    fence = "`" * (1 + max((len(found) for found in _FENCES.findall(file.text)), default=2))
    return f"{file.name}:\n{fence}\n{file.text}\n{fence}\n\n"


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


def read_files(data: Iterable[Any]) -> tuple[File, ...]:
    """Files from the browser's JSON. Raises KeyError or TypeError if the data is invalid."""
    return tuple(File(str(file["name"]), str(file["text"]), bool(file["leads"])) for file in data)


def size_of(text: str) -> str:
    """The size of a text in UTF-8, such as ``12 kB``."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes < 1000:
        return f"{n_bytes} B"
    return f"{n_bytes / 1e3:.0f} kB" if n_bytes < 999_500 else f"{n_bytes / 1e6:.1f} MB"
