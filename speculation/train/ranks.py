"""Accuracy of heads, from the rank of the correct token among a head's logits.

Rank 0 is the most likely token. N_RANKS stands for every lower rank and for tokens outside the
draft vocabulary, -1 for positions without a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.heads.tree import Path

N_RANKS = 10  # choices of a head whose accuracy is measured

Ints = npt.NDArray[np.int64]


def ranks_of(
    logits: Any, wanted: npt.NDArray[Any], tokens: npt.NDArray[np.int32] | None = None
) -> Ints:
    """The rank of each ``wanted`` token, (n,), in its row of ``logits``, a tensor (n, n_drafted).

    ``tokens`` are the token ids of the columns; None = the whole vocabulary.
    """
    import torch

    column = wanted.astype(np.int64)
    is_drafted = np.ones(len(column), bool)
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


def replay(ranks: Ints, tree: Sequence[Path]) -> float:
    """Tokens per step of a simulated decoding with ``tree``, from the heads' ``ranks`` in texts.

    Lower than the accuracies alone suggest: one step passes over several positions where the heads
    are accurate, so steps start at the harder ones more often.
    """
    nodes = set(tree)
    n_tokens = n_steps = at = 0
    while at < len(ranks):
        if ranks[at, 0] < 0:  # between texts
            at += 1
            continue
        path: tuple[int, ...] = ()
        for rank in ranks[at].tolist():
            if (*path, rank) not in nodes:
                break
            path = (*path, rank)
        n_tokens += len(path) + 1
        n_steps += 1
        at += len(path) + 1
    return n_tokens / max(1, n_steps)
