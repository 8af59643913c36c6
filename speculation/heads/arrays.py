"""Where the matrices of Medusa's and ReDrafter's heads are: NumPy on the CPU, PyTorch on a GPU.

The heads write their forward pass once, with operators that the arrays of both have.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from batching.llama.devices import gpus
from batching.tree import Floats
from speculation.drafting.tree_growth import top_tokens

Choices = list[tuple[int, float]]  # tokens with their probabilities, likeliest first


class Arrays:
    """NumPy, on the CPU."""

    def array(self, values: Floats) -> Any:
        """``values`` to compute with."""
        return np.ascontiguousarray(values)

    def floats(self, array: Any) -> Floats:
        """An array as NumPy's."""
        floats: Floats = array
        return floats

    def silu(self, inner: Any) -> Any:
        with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
            denominator = np.exp(-inner)
        denominator += 1.0
        return inner / denominator

    def top(self, logits: Any, n: int) -> list[Choices]:
        """The ``n`` likeliest tokens of each row of ``logits``, (n_rows, n_drafted), or all."""
        return [top_tokens(row, n) for row in logits]


class TorchArrays(Arrays):
    """PyTorch, on ``device``. Only what a method asks for is copied back."""

    def __init__(self, torch: Any, device: str = "cuda") -> None:
        """``torch`` is the module, ``device`` the name of a PyTorch device."""
        self._torch, self._device = torch, device

    def array(self, values: Floats) -> Any:
        return self._torch.from_numpy(np.array(values)).to(self._device)

    def floats(self, array: Any) -> Floats:
        floats: Floats = array.cpu().numpy()
        return floats

    def silu(self, inner: Any) -> Any:
        return self._torch.nn.functional.silu(inner)

    def top(self, logits: Any, n: int) -> list[Choices]:
        top = self._torch.softmax(logits, dim=1).topk(min(n, logits.shape[1]), dim=1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [list(zip(tokens, probs, strict=True)) for tokens, probs in pairs]


def fastest_arrays() -> Arrays:
    """Those of PyTorch if llama.cpp and PyTorch can both use a GPU, else NumPy's."""
    if gpus() and find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return TorchArrays(torch)
    return Arrays()
