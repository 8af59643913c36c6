"""What heads lose by the target's own distribution, in memory that does not grow with the batch.

Logits are by far the largest tensors of a step: 8 texts of 512 tokens times 152,000 tokens of
vocabulary take 2.5 GB, and a step needs a dozen of these. So they are made for some states at a
time, and once more for the way back.
"""

from __future__ import annotations

from typing import Any

MOST_LOGITS = 2**26  # at a time; 256 MB


def distribution_loss(ours: Any, output: Any, wanted: Any, matrix: Any) -> Any:
    """Mean cross-entropy of ``ours @ output.T`` with the distribution of ``wanted @ matrix.T``.

    States are (n, n_embd), output matrices (n_drafted, n_embd).
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def of(ours: Any, wanted: Any) -> Any:
        says = (wanted @ matrix.T).softmax(dim=1)
        return torch.nn.functional.cross_entropy(ours @ output.T, says, reduction="sum")

    n = max(1, MOST_LOGITS // len(matrix))
    if len(ours) <= n:
        return of(ours, wanted) / len(ours)
    parts = zip(ours.split(n), wanted.split(n), strict=True)
    return sum(checkpoint(of, *part, use_reentrant=False) for part in parts) / len(ours)
