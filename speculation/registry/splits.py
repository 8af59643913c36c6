"""Models in several files: llama.cpp is given the first and finds the others beside it."""

from __future__ import annotations

from pathlib import Path

from batching.gguf.splits import part_names
from speculation.registry.entries import ModelNotFound


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
