"""The cache folder: data that the program keeps between runs and can recreate."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``$SPECULATION_CACHE``, or ``speculation`` in the user's cache directory."""
    if "SPECULATION_CACHE" in os.environ:
        return Path(os.environ["SPECULATION_CACHE"])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "speculation"
