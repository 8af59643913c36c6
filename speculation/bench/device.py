"""Describes the machine, the library and the model. No personal data, no folders."""

from __future__ import annotations

import platform
from typing import Any

from batching.gguf.reader import fingerprint
from batching.llama.devices import devices
from batching.llama.hardware import build_info, physical_cores
from speculation.bench.report import counted
from speculation.engine import Engine
from speculation.system.computed_by import computed_by


def describe_device(engine: Engine) -> dict[str, Any]:
    """Machine and library, for the JSON."""
    return {
        "computed_by": computed_by(engine.model),
        "devices": [f"{device.kind}: {device.description}" for device in devices()],
        "cores": physical_cores(),
        "threads": engine.context.n_threads,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "build": build_info(),
    }


def describe_model(engine: Engine) -> dict[str, Any]:
    """The model, and the draft model's fingerprint, for the JSON."""
    model, draft = engine.model, engine.draft
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
        "draft_fingerprint": None if draft is None else fingerprint(draft.model.path),
    }


def describe_context(engine: Engine) -> str:
    """Model and context, and what computes, in two lines, for the terminal."""
    context = engine.context
    return (
        f"{engine.model.path.name}: {engine.model.description}, context {context.n_ctx}, "
        f"KV cache {context.params.kv_type}, flash attention {on_or_off(context.flash_attn)}, "
        f"{counted(context.n_threads, 'thread')}\n"
        f"{computed_by(engine.model)}"
    )


def on_or_off(value: bool) -> str:
    """A switch as it is written in flags."""
    return "on" if value else "off"
