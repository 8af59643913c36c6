"""Accuracy of heads, from the rank of the correct token among a head's logits, and its tables.

Rank 0 is the most likely token. N_RANKS stands for every lower rank and for tokens outside the
draft vocabulary, -1 for positions without a label.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from batching.tree import Floats

N_RANKS = 10  # choices of a head whose accuracy is measured

Ints = npt.NDArray[np.int64]


def ranks_of(
    logits: Any, wanted: npt.NDArray[Any], tokens: npt.NDArray[np.int32] | None = None
) -> Ints:
    """The rank of each ``wanted`` token, (n,), in its row of ``logits``, a tensor (n, n_drafted).

    ``tokens`` are the token ids of the columns, ascending; None = the whole vocabulary.
    """
    import torch

    column, is_drafted = wanted.astype(np.int64), np.full(len(wanted), True)
    if tokens is not None:
        column = np.searchsorted(tokens, wanted).clip(max=len(tokens) - 1)
        is_drafted = tokens[column] == wanted
    correct = logits.gather(1, torch.from_numpy(column).to(logits.device)[:, None])
    found: Ints = (logits > correct).sum(dim=1).clamp(max=N_RANKS).cpu().numpy()
    return np.where(is_drafted, found, N_RANKS)


def accuracy_of(ranks: Ints) -> Floats:
    """Accuracy of each head's top choices, (n_heads, N_RANKS), from ranks (n, n_heads)."""
    found = np.zeros((ranks.shape[1], N_RANKS), np.float32)
    for head, column in enumerate(ranks.T):
        known = column[column >= 0]
        if len(known):
            found[head] = np.bincount(known, minlength=N_RANKS + 1)[:N_RANKS] / len(known)
    return found


def chain_accuracy(ranks: Ints) -> Floats:
    """Accuracy at each depth of a chain, given that the first choices above it were all correct.

    ``ranks`` is (n, n_depths), one row per chain; returns (n_depths, N_RANKS).
    """
    reached = ranks.copy()
    for depth in range(1, ranks.shape[1]):
        reached[(ranks[:, :depth] != 0).any(axis=1), depth] = -1
    return accuracy_of(reached)


def report(ranks: Ints) -> str:
    """What the user is shown of heads, from their ranks (n, n_depths): accuracies in percent."""
    accuracy = chain_accuracy(ranks)
    n_tokens = 1 + float(np.cumprod(accuracy[:, 0]).sum())
    numbers = "".join(f"{rank + 1:6}" for rank in range(N_RANKS))
    rows = [
        f"{i:5} "
        + "".join(f"{value:6.1f}" for value in row)
        + f"{row[:3].sum():8.1f}{row[:5].sum():7.1f}"
        for i, row in enumerate(100 * accuracy, 1)
    ]
    return "\n".join(
        (
            f"\nmeasured on {(ranks[:, 0] >= 0).sum():,} held-out states, for each draft token of",
            "a chain, given that the first choices before it were correct",
            "accuracy of each choice, and of the top 3 and top 5 together, in %",
            f"token {numbers}   top 3  top 5",
            *rows,
            f"\na chain of {len(accuracy)} gives {n_tokens:.2f} tokens per step",
        )
    )
