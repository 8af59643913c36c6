"""Training drafting heads for a model, on the machine it runs on: ``python -m speculation.train``.

``texts`` says what the target reads, ``states`` collects what it thinks while reading, a module for
each kind of heads learns from that. Needs PyTorch and gguf (the extra ``train``), imported where
they are used.
"""

from __future__ import annotations

from importlib.util import find_spec

from batching.errors import SpeculationError


class TrainError(SpeculationError):
    """Heads cannot be trained: no PyTorch, no usable text, no room."""


def require_packages() -> None:
    """Raise TrainError with the command to give where PyTorch or gguf is missing."""
    missing = [name for name in ("torch", "gguf") if find_spec(name) is None]
    if missing:
        raise TrainError(
            f"training needs {' and '.join(missing)}, not installed here; install what is needed "
            f"with: python -m pip install 'torch>=2.6' 'gguf>=0.17' 'pyyaml>=6'"
        )


def require_gguf() -> None:
    """Raise TrainError with the command to give where gguf, which writes heads, is missing."""
    if find_spec("gguf") is None:
        raise TrainError(
            "writing heads needs gguf, not installed here; install it with: "
            "python -m pip install 'gguf>=0.17'"
        )
