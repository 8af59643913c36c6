"""Checks whether both sides run the same build of llama.cpp, by hashing its libraries."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = re.compile(r"(lib)?(llama|ggml(-[\w-]+)?)\.(so|dylib|dll)")


@dataclass(frozen=True)
class Libraries:
    """The comparison of two builds' libraries.

    same    whether all are identical
    unlike  names of those that differ or are missing on one side
    """

    same: bool
    unlike: tuple[str, ...]

    def text(self, folder: Path) -> str:
        """The result as a line of text."""
        if self.same:
            return "libraries: identical on both sides"
        if not self.unlike:
            return (
                f"libraries: none next to the programs in {folder}; llama.cpp is linked "
                f"statically, so its build cannot be compared with ours"
            )
        return (
            f"libraries: NOT the same build ({', '.join(self.unlike)} differ), which affects the "
            f"ratios; to use theirs for both sides, set LLAMA_CPP_LIB_PATH={folder}"
        )


def compare_libraries(ours: Path, theirs: Path) -> Libraries:
    """Compare llama.cpp's libraries in two folders."""
    here, there = _hashes(ours), _hashes(theirs)
    if not there:
        return Libraries(False, ())
    names = sorted({*here, *there})
    unlike = tuple(name for name in names if here.get(name) != there.get(name))
    return Libraries(not unlike, unlike)


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each library by name; ignores links with version numbers."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if _LIBRARY.fullmatch(path.name) and path.is_file()
    }
