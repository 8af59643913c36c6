"""Training drafting heads for a model, on the machine it runs on: ``python -m speculation.train``.

``texts`` says what the target reads, ``states`` collects what it thinks while reading, a module for
each kind of heads learns from that. Needs PyTorch (the extra ``train``), imported where
it is used.
"""

from __future__ import annotations

from importlib.util import find_spec

from batching.errors import SpeculationError


class TrainError(SpeculationError):
    """Heads cannot be trained: no PyTorch, no usable text, no room."""


def require_packages() -> None:
    """Raise TrainError with the command to give where PyTorch is missing."""
    if find_spec("torch") is None:
        raise TrainError(
            "training needs torch, not installed here; install it with: "
            "python -m pip install 'torch>=2.6'"
        )
