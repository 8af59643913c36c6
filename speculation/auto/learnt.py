"""What is learnt about a model on this machine, kept in the user's cache from run to run.

The cost of a decode, the acceptance estimates of the drafters, and what asking them brought. One
file per model, build, device, GPU layers, experts in main memory, thread count, KV type, flash
attention, layout of the weights and rewind; in it, all but the cost by draft model and heads.
Files of their own have the fastest settings, and how many rows ``exact`` computes at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batching.llama import exact
from batching.llama.context import Context, ContextParams
from batching.llama.context_params import MAX_THREADS
from batching.llama.devices import Placement
from batching.llama.exact import one_kernel
from batching.llama.hardware import build_info
from batching.llama.model import Model
from batching.llama.tune import Settings
from batching.replacing import replacing
from speculation.drafting.cost import SIZES, Cost, CostCurve
from speculation.system.cache_folder import cache_folder

_VERSION = 19  # of the contents; older files are ignored
_MOST = 100.0  # no log-odds, tokens or seconds are more
_LEAST_SECONDS = 1e-8
log = logging.getLogger(__name__)


def load(path: Path) -> dict[str, Any]:
    """What was saved in ``path``; empty if there is nothing readable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("cannot read what was learnt in %s, so it is learnt anew: %s", path, error)
        return {}
    return found if isinstance(found, dict) else {}


def save(path: Path, earlier: dict[str, Any], cost: Cost, key: str, states: dict[str, Any]) -> None:
    """Keep the cost and the ``states`` under ``key``, with those under other keys in ``earlier``.

    A rough cost is not kept: the next run measures it. A full disk is ignored.
    """
    learnt: dict[str, Any] = {"states": {**_dict(earlier, "states"), key: states}}
    if not cost.is_rough:
        learnt["cost"] = {"near": asdict(cost.near), "far": cost.far and asdict(cost.far)}
    _write(path, learnt)


def _write(path: Path, learnt: dict[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(learnt).encode())


def states(learnt: dict[str, Any], key: str) -> dict[str, Any]:
    """The states saved under ``key``, without damaged ones; empty if there are none."""
    found = _dict(_dict(learnt, "states"), key)
    sound = {name: state for name, state in found.items() if _are_numbers(state)}
    if damaged := found.keys() - sound:
        log.warning("damaged on disk, so learnt anew: %s", ", ".join(sorted(damaged)))
    return sound


def cost(learnt: dict[str, Any]) -> Cost | None:
    """The cost in ``learnt``; None if there is none, or if it is damaged."""
    try:
        data = learnt["cost"]
        far = data["far"]
        return Cost(_curve(data["near"]), None if far is None else _curve(far))
    except (KeyError, TypeError, ValueError):  # missing, damaged or of another format
        if "cost" in learnt:
            log.warning("damaged on disk, so measured anew: what a decode costs")
        return None


def _curve(data: Any) -> CostCurve:
    """A curve as it was saved. Raises TypeError and ValueError."""
    curve = CostCurve(**data)
    numbers = [*curve.seconds, curve.switch_seconds]
    are_sizes = all(type(size) is int and size <= SIZES[-1] for size in curve.sizes)
    is_sound = _are_numbers(numbers) and curve.switch_seconds >= 0
    if not are_sizes or not is_sound or min(curve.seconds) < _LEAST_SECONDS:
        raise ValueError("no curve")
    return curve


def _are_numbers(value: object) -> bool:
    """Whether ``value`` is a list of numbers that may have been learnt."""
    return isinstance(value, list) and all(
        type(item) in (int, float) and abs(item) <= _MOST for item in value
    )


def _dict(data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def file_for(context: Context) -> Path:
    """The file of what is learnt about the model of ``context``."""
    params, n_ubatch = context.params, context.params.n_ubatch
    layout = context.model.is_repacked, context.flash_attn
    facts = context.n_threads, params.kv_type, layout, context.n_rewind, n_ubatch
    return _file(context.model, facts)


def settings_file(model: Path, params: ContextParams, placement: Placement) -> Path:
    """The file of the settings with which ``model`` is fastest, if ``params`` leave them open."""
    given = params.n_threads, params.kv_type, params.flash_attn, params.n_slots > 1
    return _named(model.name, model.stat().st_size, build_info(), placement, given)


def settings(path: Path) -> Settings | None:
    """The settings saved in ``path``; None if there are none."""
    found = load(path)
    n_threads = found.get("n_threads")
    is_sound = type(n_threads) is int and 0 <= n_threads <= MAX_THREADS
    is_sound &= all(type(found.get(name)) is bool for name in ("repack", "flash_attn"))
    return Settings(**found) if is_sound and len(found) == 3 else None


def save_settings(path: Path, found: Settings) -> None:
    _write(path, asdict(found))


def equal_rows(model: Model, params: ContextParams) -> int:
    """How many rows agree with single rows: as saved, else measured; with 1, no draft pays."""
    path = _file(model, ("rows", params.n_threads, params.kv_type, one_kernel()))
    found = load(path).get("rows")
    if type(found) is not int or not 1 <= found <= params.n_batch:
        found = exact.equal_rows(model, params)
        _write(path, {"rows": found})
    if found == 1:
        log.warning(
            "exact: no two rows of %s (%s) have the bits of single rows here, so every text is "
            "decoded plainly; other weights, such as Q8_0, draft",
            model.path,
            model.description,
        )
    return found


def _file(model: Model, facts: object) -> Path:
    identity = (
        model.path.name,
        model.n_bytes,
        model.description,
        build_info(),
        [(device.name, device.description) for device in model.devices],
        model.n_gpu_layers,
        model.n_cpu_moe,
        facts,
    )
    return _named(identity)


def _named(*facts: object) -> Path:
    name = hashlib.sha256(repr((_VERSION, *facts)).encode()).hexdigest()[:24]
    return cache_folder() / "learnt" / f"{name}.json"
