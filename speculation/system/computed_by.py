"""Which device computes a model, and why not the GPU if this machine has one: one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from batching.llama.devices import Device, devices, gpus
from batching.llama.library import exported
from batching.llama.model import Model

_FUNCTIONS = {"CUDA": "ggml_backend_cuda_init", "Vulkan": "ggml_backend_vk_init"}
_SECONDS = 90  # for the program below, which gives each one that it asks 20
# What the installation asks, which knows how to compile for a GPU; in a package, beside models.txt.
_PROGRAMS = ("tools/gpu_build.py", "speculation/registry_data/gpu_build.py")


def computed_by(model: Model) -> str:
    """``Computed by the CPU (AMD EPYC): …``."""
    cpu = next((f" ({one.description})" for one in devices() if one.kind == "cpu"), "")
    n = model.n_layer - model.n_host_layers
    names = _named(model.devices)
    without = ""
    if model.n_cpu_moe > model.n_host_layers:
        without = f" without the experts of the first {model.n_cpu_moe}"
    if n == model.n_layer and not without:
        return f"Computed by {names}."
    if n:
        return f"Computed by {names}, {n} of {model.n_layer} layers{without}, and the CPU{cpu}."
    found, placement = _named(gpus()), model.placement
    if not found:
        why = why_no_gpu()
    elif placement.devices is not None or placement.n_gpu_layers == 0:
        why = f"the settings leave out {found}"
    else:
        why = f"no layer fits into the free memory of {found}"
    return f"Computed by the CPU{cpu}{': ' if why else ''}{why}."


def why_no_gpu() -> str:
    """Why llama.cpp lists no GPU although this machine has one; empty if it has none."""
    choice = _choice()
    if choice is None:
        return ""
    is_built = bool(choice["backend"]) and exported(_FUNCTIONS[choice["backend"]]) is not None
    return missing(choice, is_built)


def _choice() -> Mapping[str, str] | None:
    """How llama.cpp would be compiled for this machine: the fields of tools/gpu_build.Choice.

    None if its program cannot be run.
    """
    root = Path(__file__).resolve().parents[2]
    for program in filter(Path.is_file, map(root.joinpath, _PROGRAMS)):
        try:
            told = subprocess.check_output(
                [sys.executable, "-I", program],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        choice: Mapping[str, str] = json.loads(told)
        return choice
    return None


def missing(choice: Mapping[str, str], is_built: bool) -> str:
    """The same for the GPU of ``choice``; ``is_built``: llama.cpp has the backend for it."""
    gpu, backend, flags, needs = (choice[name] for name in ("gpu", "backend", "flags", "needs"))
    if not gpu:
        return ""
    has = f"this machine has {gpu}, but llama.cpp"
    if is_built:
        program = "nvidia-smi" if backend == "CUDA" else "vulkaninfo"
        return f"{has} finds no device for {backend}; see whether `{program}` does"
    if flags:
        command = f'CMAKE_ARGS="{flags}" sh tools/run chat'
        return f"{has} was compiled without {backend}; `{command}` compiles it"
    return f"{has} was compiled without {backend}; install {needs}, then run `sh tools/run chat`"


def _named(some: list[Device]) -> str:
    return " and ".join(f"{device.name} ({device.description})" for device in some)
