"""Split models: llama.cpp opens the first file and finds the others in the same folder."""

from __future__ import annotations

from pathlib import Path

from batching.gguf.splits import part_names
from speculation.registry.entries import ModelNotFound


def first_part(path: Path) -> Path:
    """The first file of the split model of ``path``. Raises ModelNotFound if a file is missing."""
    files = [path.with_name(name) for name in part_names(path.name)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFound(
            f"{path} is one of {len(files)} files of a model; missing from its folder: "
            f"{', '.join(missing[:3])}{more}; put all files into one folder"
        )
    return files[0]
