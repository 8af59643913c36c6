"""Which device computes a model, and why not the GPU if this machine has one: one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from batching.gpu_build import Choice, choose, look
from batching.llama.devices import Device, Placement, devices, gpus
from batching.llama.library import exported
from batching.llama.model import Model

_FUNCTIONS = {"CUDA": "ggml_backend_cuda_init", "Vulkan": "ggml_backend_vk_init"}


def computed_by(model: Model) -> str:
    """``Computed by the CPU (AMD EPYC): …``."""
    cpu = next((f" ({one.description})" for one in devices() if one.kind == "cpu"), "")
    n = model.n_layer - model.n_host_layers
    names = " and ".join(_name(device) for device in model.devices)
    without = ""
    if model.n_cpu_moe > model.n_host_layers:
        without = f" without the experts of the first {model.n_cpu_moe}"
    if n == model.n_layer and not without:
        return f"Computed by {names}."
    if n:
        return f"Computed by {names}, {n} of {model.n_layer} layers{without}, and the CPU{cpu}."
    why = why_not(model.placement, gpus()) or why_no_gpu()
    return f"Computed by the CPU{cpu}{': ' if why else ''}{why}."


def why_not(placement: Placement, found: Sequence[Device]) -> str:
    """Why a model has no layer on the GPUs that llama.cpp lists; empty if it lists none."""
    if not found:
        return ""
    names = " and ".join(_name(device) for device in found)
    if placement.devices is not None or placement.n_gpu_layers == 0:
        return f"the settings leave out {names}"
    return f"no layer fits into the free memory of {names}"


def why_no_gpu() -> str:
    """Why llama.cpp lists no GPU although this machine has one; empty if it has none."""
    choice = choose(look())
    is_built = bool(choice.backend) and exported(_FUNCTIONS[choice.backend]) is not None
    return missing(choice, is_built)


def missing(choice: Choice, is_built: bool) -> str:
    """The same for the GPU of ``choice``; ``is_built``: llama.cpp has the backend for it."""
    if not choice.gpu:
        return ""
    has = f"this machine has {choice.gpu}, but llama.cpp"
    if is_built:
        program = "nvidia-smi" if choice.backend == "CUDA" else "vulkaninfo"
        return f"{has} finds no device for {choice.backend}; see whether `{program}` does"
    if choice.flags:
        command = f'CMAKE_ARGS="{choice.flags}" sh tools/run chat'
        return f"{has} was compiled without {choice.backend}; `{command}` compiles it"
    return (
        f"{has} was compiled without {choice.backend}; install {choice.needs}, then run "
        "`sh tools/run chat`"
    )


def _name(device: Device) -> str:
    return f"{device.name} ({device.description})"
