"""What the figures were measured on: machine, library, model. Nothing personal, no folders."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

from batching.hardware import build_info, devices, physical_cores
from batching.model import Model
from speculation.engine import Engine

_MIB = 2**20


def describe_device(engine: Engine) -> dict[str, Any]:
    """Machine and library, for the JSON."""
    return {
        "devices": [f"{device.kind}: {device.name}" for device in devices()],
        "cores": physical_cores(),
        "threads": engine.context.n_threads,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "build": build_info(),
    }


def describe_model(model: Model, draft: Model | None = None) -> dict[str, Any]:
    """The model by its file's name, and which draft model goes with it, for the JSON."""
    return {
        "file": model.path.name,
        "name": model.metadata("general.name"),
        "description": model.description,
        "file_type": model.metadata("general.file_type"),
        "n_params": model.n_params,
        "n_bytes": model.n_bytes,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "fingerprint": fingerprint(model.path),
        "draft_fingerprint": None if draft is None else fingerprint(draft.path),
    }


def fingerprint(path: Path) -> str:
    """Tells a model file from another of the same name and size without reading gigabytes.

    SHA-256 of its length, its first MiB (metadata, vocabulary) and its last (weights), 16 digits.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]
