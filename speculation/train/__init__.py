"""Training of drafting heads on the user's machine: ``python -m speculation.train``.

``texts`` reads the training data, ``states`` collects the target's hidden states over it, and
``training`` has the loop that learns from them. A module for each kind of heads gives its network,
its loss and its file; they need PyTorch, the extra ``train``.
"""

from __future__ import annotations

from batching.errors import SpeculationError


class TrainError(SpeculationError):
    """Heads cannot be trained: PyTorch is missing, the data is unusable, or the disk is full."""
