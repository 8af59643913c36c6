"""The files of a model in several, ``name-00001-of-00003.gguf``, as llama-gguf-split makes them."""

from __future__ import annotations

import re

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all files of the model that ``name`` is one of, in order: itself, where it is
    whole. Folders before it stay."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    count = match["count"]
    return [f"{match['name']}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]
