"""Cross-entropy with the target's distribution, in memory that does not grow with the batch.

Logits are by far the largest tensors of a step: for 8 sequences of 512 tokens and a vocabulary of
152,000 they take 2.5 GB, and a step needs a dozen such tensors. So they are computed in chunks, and
again in the backward pass (gradient checkpointing).
"""

from __future__ import annotations

import math
from typing import Any

MAX_LOGITS = 2**26  # in one chunk; 256 MB


def distribution_loss(ours: Any, output: Any, wanted: Any, matrix: Any, n_zero: int = 0) -> Any:
    """Mean cross-entropy of our logits, ``ours @ output.T``, with the target's distribution,
    softmax of ``wanted @ matrix.T``.

    States are (n, width), output matrices (n_drafted, width), each with widths of its own. We have
    ``n_zero`` more logits, which are 0; the target has none of these tokens.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def of(ours: Any, wanted: Any) -> Any:
        p = (wanted @ matrix.T).softmax(dim=1)
        logits = ours @ output.T
        if not n_zero:
            return torch.nn.functional.cross_entropy(logits, p, reduction="sum")
        zeros = torch.full_like(logits[:, :1], math.log(n_zero))
        n_all = torch.cat([logits, zeros], dim=1).logsumexp(dim=1)
        return (n_all - (p * logits).sum(dim=1)).sum()

    n = max(1, MAX_LOGITS // len(matrix))
    if len(ours) <= n:
        return of(ours, wanted) / len(ours)
    parts = zip(ours.split(n), wanted.split(n), strict=True)
    return sum(checkpoint(of, *part, use_reentrant=False) for part in parts) / len(ours)
