"""Text files that go with a message: how the model reads them, and what the browser sends of them.

Knows nothing of conversations, of Gradio or of HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FENCES = re.compile("`{3,}")


@dataclass(frozen=True)
class File:
    """A text file of a message; it ``leads`` where it comes before what was written."""

    name: str
    text: str
    leads: bool = True


def with_files(text: str, files: Sequence[File]) -> str:
    """The message as the model reads it: what was written, and each file as a block of code."""
    before = "".join(_quoted(file) for file in files if file.leads)
    after = "".join(_quoted(file) for file in files if not file.leads)
    written = f"{text}\n\n" if text and after else text
    return f"{before}{written}{after}".strip("\n") if files else text


def _quoted(file: File) -> str:
    """Its name and a block whose fence is longer than any in the text."""
    fence = "`" * (1 + max((len(found) for found in _FENCES.findall(file.text)), default=2))
    return f"{file.name}:\n{fence}\n{file.text}\n{fence}\n\n"


def read_files(data: Iterable[Any]) -> tuple[File, ...]:
    """What the browser sent or kept; raises KeyError or TypeError for what is none."""
    return tuple(File(str(file["name"]), str(file["text"]), bool(file["leads"])) for file in data)


def files_to_text(files: Iterable[File]) -> str:
    return json.dumps([asdict(file) for file in files], ensure_ascii=False)


def size_of(text: str) -> str:
    """How much it is as UTF-8, for people."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes < 1000:
        return f"{n_bytes} B"
    return f"{n_bytes / 1e3:.0f} kB" if n_bytes < 999_500 else f"{n_bytes / 1e6:.1f} MB"
