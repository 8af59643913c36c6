"""Files of training data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def lines(path: Path, *objects: object) -> Path:
    text = "".join(json.dumps(item) + "\n" for item in objects)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
