"""An output and a sampler that give scripted tokens, for tests of one drafter or one verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from batching.target import Output
from batching.tree import Floats


class ScriptedOutput:
    """The argmax of each row is given; logits are zeros, and there are no hidden states."""

    def __init__(self, tokens: Sequence[int] | Mapping[int, int] = (), n_vocab: int = 512) -> None:
        self._tokens = tokens
        self.n_vocab = n_vocab

    def logits(self, row: int) -> Floats:
        return np.zeros(self.n_vocab, np.float32)

    def argmax(self, row: int) -> int:
        return self._tokens[row]

    def argmaxes(self, first: int, n: int) -> list[int]:
        return [self.argmax(row) for row in range(first, first + n)]

    def hidden(self, row: int) -> Floats:
        raise RuntimeError("hidden states were not asked for")

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        raise RuntimeError("auxiliary hidden states were not asked for")


class ScriptedSampler:
    """Chooses the given tokens in order, and keeps the rows it was asked for."""

    reads_logits = True

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.rows: list[int] = []

    def sample(self, output: Output, row: int) -> int:
        self.rows.append(row)
        return self._tokens[len(self.rows) - 1]

    def probabilities(self, logits: Floats) -> Floats:
        raise NotImplementedError

    def accept(self, token: int) -> None:
        raise NotImplementedError
