"""The highest logits of a row. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batching.tree import Floats

FAR = 8.0  # logits below the highest; e^8 is about 3,000


def highest(logits: Floats, n: int, far: float = FAR) -> tuple[npt.NDArray[np.integer], Floats]:
    """The tokens of the ``n`` highest of ``logits``, (n_vocab,), and these logits, in no order.

    Leaves out those that are ``far`` below the highest, or -inf.
    """
    (tokens,) = (logits > logits.max() - far).nonzero()  # usually few, so little to sort
    values = logits[tokens]
    if len(tokens) > n:
        kept = values.argpartition(-n)[-n:]
        tokens, values = tokens[kept], values[kept]
    return tokens, values
