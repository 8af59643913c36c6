"""Whether both sides run the very same llama.cpp, told by the files of its libraries."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = re.compile(r"(lib)?(llama|ggml(-[\w-]+)?)\.(so|dylib|dll)")


@dataclass(frozen=True)
class Libraries:
    """``same``: equal to the last byte; ``unlike``: those that differ or lack a partner."""

    same: bool
    unlike: tuple[str, ...]

    def text(self, folder: Path) -> str:
        """What the reader has to know before the ratios."""
        if self.same:
            return "libraries: the same on both sides, byte by byte"
        if not self.unlike:
            return (
                f"libraries: none beside the programs in {folder}; they have llama.cpp built in, "
                f"and whether it is the build that runs here cannot be told"
            )
        return (
            f"libraries: NOT the same build ({', '.join(self.unlike)} differ), which shows in the "
            f"ratios; to run ours on theirs, start with LLAMA_CPP_LIB_PATH={folder}"
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
    """SHA-256 of each library by its plain name; links with version numbers are left aside."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if _LIBRARY.fullmatch(path.name) and path.is_file()
    }
