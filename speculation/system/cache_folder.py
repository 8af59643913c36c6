"""The cache folder: data that the program keeps between runs and can recreate."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """``$SPECULATION_CACHE``, or ``speculation`` in the user's cache directory."""
    own = os.environ.get("SPECULATION_CACHE")
    return user_cache_path("speculation", appauthor=False) if own is None else Path(own)
