"""The text of a PDF, read apart from the server."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

MOST_TEXT = 1_000_000  # characters
MOST_PAGES = 2000


def text_of_pdf(data: bytes) -> Iterator[str]:
    """The text of a PDF, page by page. Raises ValueError; pypdf raises almost anything."""
    from pypdf import PdfReader  # takes long, and most servers never need it

    n_characters = 0
    pages = PdfReader(BytesIO(data)).pages
    if len(pages) > MOST_PAGES:
        raise ValueError(f"it has more than {MOST_PAGES:,} pages. Attach a part of it.")
    for page in pages:
        text = page.extract_text().strip()
        n_characters += len(text)
        if n_characters > MOST_TEXT:
            raise ValueError(f"it has more than {MOST_TEXT:,} characters. Attach a part of it.")
        if text:
            yield text
    if not n_characters:
        raise ValueError("it has no text. If its pages are pictures, paste their text.")
