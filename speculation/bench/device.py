"""What the figures were measured on: machine, library, model. Nothing personal, no folders."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from batching.model import Model, build_info, physical_cores, supports_gpu
from speculation.engine import Engine


def describe_device(engine: Engine) -> dict[str, Any]:
    """Machine and library, for the JSON."""
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "threads": engine.context.n_threads,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "build": build_info(),
        "gpu_support": supports_gpu(),
    }


def describe_model(model: Model) -> dict[str, Any]:
    """The model by its file's name, for the JSON."""
    return {
        "file": model.path.name,
        "name": model.metadata("general.name"),
        "description": model.description,
        "file_type": model.metadata("general.file_type"),
        "n_params": model.n_params,
        "n_bytes": model.n_bytes,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
    }


def cpu_name() -> str:
    """The processor's name as its maker writes it, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip():
            return answer.stdout.strip()
    return os.environ.get("PROCESSOR_IDENTIFIER") or platform.processor() or platform.machine()
