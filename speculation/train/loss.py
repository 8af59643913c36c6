"""Cross-entropy with the target's distribution, in memory that does not grow with the batch.

Logits are by far the largest tensors of a step: for 8 sequences of 512 tokens and a vocabulary of
152,000 they take 2.5 GB, and a step needs a dozen such tensors. So they are computed in chunks, and
again in the backward pass (gradient checkpointing).
"""

from __future__ import annotations

from typing import Any

MAX_LOGITS = 2**26  # in one chunk; 256 MB


def distribution_loss(ours: Any, output: Any, wanted: Any, matrix: Any) -> Any:
    """Mean cross-entropy of the head's logits, ``ours @ output.T``, with the target's distribution,
    softmax of ``wanted @ matrix.T``.

    States are (n, n_embd), output matrices (n_drafted, n_embd).
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def of(ours: Any, wanted: Any) -> Any:
        p = (wanted @ matrix.T).softmax(dim=1)
        return torch.nn.functional.cross_entropy(ours @ output.T, p, reduction="sum")

    n = max(1, MAX_LOGITS // len(matrix))
    if len(ours) <= n:
        return of(ours, wanted) / len(ours)
    parts = zip(ours.split(n), wanted.split(n), strict=True)
    return sum(checkpoint(of, *part, use_reentrant=False) for part in parts) / len(ours)
