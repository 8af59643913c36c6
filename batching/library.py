"""Where the llama.cpp that runs here was loaded from."""

from __future__ import annotations

from pathlib import Path

import llama_cpp.llama_cpp as C


def library_folder() -> Path:
    """The folder of llama.cpp's shared libraries: the package's own, or LLAMA_CPP_LIB_PATH."""
    return Path(C._lib._name).absolute().parent
