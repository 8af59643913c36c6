"""Chooses between NumPy on the CPU and PyTorch on the GPU for Medusa and ReDrafter heads."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from batching.llama.devices import gpus


def torch_on_gpu() -> Any:
    """The torch module if both llama.cpp and PyTorch can use a GPU, else None."""
    if gpus() and find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return torch
    return None
