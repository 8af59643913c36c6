"""What is learnt about a model on this machine, kept in the user's cache from run to run.

The measured cost of a decode, the acceptance estimates of the drafters, and the gains of ``auto``'s
sources. One file per model, build, device, GPU layers, thread
count, KV type, flash attention and rewind; in it, estimates and gains by draft model and heads.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batching.llama.context import Context
from batching.llama.hardware import build_info
from speculation.auto.calibration import measure
from speculation.drafting.cost import Cost, CostCurve
from speculation.system.cache_folder import cache_folder

_VERSION = 14  # of the contents; older files are ignored


def load(path: Path) -> dict[str, Any]:
    """What was saved in ``path``; empty if there is nothing readable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save(path: Path, earlier: dict[str, Any], cost: Cost, key: str, states: dict[str, Any]) -> None:
    """Keep the cost and the ``states`` under ``key``, with those under other keys in ``earlier``.

    Write errors, such as a full disk, are ignored.
    """
    learnt = {
        "cost": {
            "near": asdict(cost.near),
            "far": cost.far and asdict(cost.far),
            "shape": cost.shape,
            "weights": cost.weights,
        },
        "states": {**_dict(earlier, "states"), key: states},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".partial", delete=False, encoding="utf-8"
        ) as file:
            json.dump(learnt, file)
        Path(file.name).replace(path)
    except OSError:
        return


def states(learnt: dict[str, Any], key: str) -> dict[str, Any]:
    """The states saved under ``key``; empty if there are none."""
    return _dict(_dict(learnt, "states"), key)


def cost(
    learnt: dict[str, Any],
    context: Context,
    progress: Callable[[int], None] | None = None,
) -> Cost:
    """The cost in ``learnt``, else measured.

    ``progress`` gets each size that is measured; an exception from it stops the measurement.
    """
    try:
        data = learnt["cost"]
        near, far = (curve and CostCurve(**curve) for curve in (data["near"], data["far"]))
        return Cost(near, far, shape=data["shape"], weights=data["weights"])
    except (KeyError, TypeError, ValueError, AttributeError):  # missing, or another format
        return measure(context, progress=progress)


def _dict(data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def file_for(context: Context) -> Path:
    """The file of what is learnt about the model of ``context``."""
    model = context.model
    identity = (
        _VERSION,
        model.path.name,
        model.n_bytes,
        model.description,
        build_info(),
        [(device.name, device.description) for device in model.devices],
        context.n_threads,
        context.params.kv_type,
        context.flash_attn,
        model.n_gpu_layers,
        context.n_rewind,
    )
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
    return cache_folder() / "learnt" / f"{name}.json"
