"""File names of split models: ``name-00001-of-00003.gguf``, as written by llama-gguf-split."""

from __future__ import annotations

import re

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """Names of all files of the model that ``name`` belongs to, in order; keeps any folder part.

    >>> part_names("m-00002-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    >>> part_names("m.gguf")
    ['m.gguf']
    """
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    count = match["count"]
    return [f"{match['name']}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]
