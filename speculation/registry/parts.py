"""Models in several files, ``name-00001-of-00003.gguf``, as llama-gguf-split makes them.

llama.cpp is given the first and finds the others beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

from speculation.registry.entries import ModelNotFound

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all files of the model that ``name`` is one of, in order: itself, where it is
    whole. Folders before it stay."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    count = match["count"]
    return [f"{match['name']}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def first_part(path: Path) -> Path:
    """The file to open for the model that ``path`` is a file of. Raises ModelNotFound."""
    files = [path.with_name(name) for name in part_names(path.name)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFound(
            f"{path} is one of {len(files)} files of a model, and not beside it: "
            f"{', '.join(missing[:3])}{more}; put them all into one folder"
        )
    return files[0]
