"""The loaded llama.cpp library: its folder, and lookup of exported functions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

# Linux and macOS also search a library's dependencies for a symbol; Windows does not.
_LINKED = ("ggml.dll", "ggml-base.dll", "libggml.dll", "libggml-base.dll")


def library_folder() -> Path:
    """The folder of llama.cpp's shared libraries: the package's, or LLAMA_CPP_LIB_PATH."""
    return Path(C._lib._name).absolute().parent


@cache
def exported(*names: str) -> Any:
    """The function llama.cpp or ggml exports under one of ``names``, or None."""
    for library in _libraries():
        for name in names:
            with suppress(AttributeError):
                return library[name]
    return None


def declared(name: str, result: Any, *arguments: Any) -> Any:
    """An exported function with the types of its result and its arguments, or None."""
    function = exported(name)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return function


def _libraries() -> Iterator[Any]:
    yield C._lib
    for file in map(library_folder().joinpath, _LINKED):
        if file.is_file():
            yield ctypes.CDLL(str(file))
