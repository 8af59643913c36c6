"""Where heads that are matrices compute: on the GPU if the target does, and PyTorch can."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from batching.llama.hardware import supports_gpu


def torch_on_gpu() -> Any:
    """PyTorch where llama.cpp runs on a GPU and PyTorch has CUDA as well; else None."""
    if supports_gpu() and find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return torch
    return None
