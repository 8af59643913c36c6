"""How good heads are: the rank of what was wanted among what they say, by place and head.

Ranks are counted from 0, the likeliest; N_RANKS stands for all from there on and for tokens that
are not drafted, -1 for places where nothing is known.
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

    ``tokens`` are the tokens of the columns where that is not their own number.
    """
    import torch

    column = wanted.astype(np.int64)
    is_drafted = np.ones(len(column), bool)
    if tokens is not None:
        column = np.searchsorted(tokens, wanted).clip(max=len(tokens) - 1)
        is_drafted = tokens[column] == wanted
    right = logits.gather(1, torch.from_numpy(column).to(logits.device)[:, None])
    found: Ints = (logits > right).sum(dim=1).clamp(max=N_RANKS).cpu().numpy()
    return np.where(is_drafted, found, N_RANKS)


def accuracy_of(ranks: Ints) -> Floats:
    """How often each choice of each head is right, (n_heads, N_RANKS), from ``ranks``."""
    found = np.zeros((ranks.shape[1], N_RANKS), np.float32)
    for head, column in enumerate(ranks.T):
        known = column[column >= 0]
        if len(known):
            found[head] = np.bincount(known, minlength=N_RANKS + 1)[:N_RANKS] / len(known)
    return found


def chain_accuracy(ranks: Ints) -> Floats:
    """How often each choice of token d of a chain is right if the first choices before it were.

    ``ranks`` is (n, n_depths), a row for each place where a chain was begun; (n_depths, N_RANKS).
    """
    on_the_way = ranks.copy()
    for depth in range(1, ranks.shape[1]):
        on_the_way[(ranks[:, :depth] != 0).any(axis=1), depth] = -1
    return accuracy_of(on_the_way)


def replayed(ranks: Ints, tree: Sequence[Path]) -> float:
    """Tokens per step when texts whose states have these ``ranks`` are decoded with ``tree``.

    A step goes as far as the tree holds what was right; the next goes on behind it. It is less
    than the accuracies promise, since the places where much is right are soon left behind.
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
