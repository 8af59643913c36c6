"""BigramTable: the most likely successors of every token."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.logits import highest
from batching.replacing import replacing
from batching.tree import Floats

N_NEXT = 8  # tokens kept after each


class BigramTable:
    """The most likely successors of every token, with probabilities, in descending order.

    Changes stay in memory. What is learnt from a text replaces the token's earlier successors.
    """

    def __init__(
        self, tokens: npt.NDArray[np.integer] | None = None, probs: Floats | None = None
    ) -> None:
        """Start empty, or from ``tokens`` and ``probs``, both (n_vocab, k); p = 0 means none."""
        self._start = (tokens, probs)
        self._rows: dict[int, list[tuple[int, float]]] = {}

    @classmethod
    def from_sums(
        cls, sums: Mapping[int, Mapping[int, float]], counts: Mapping[int, int], n_vocab: int
    ) -> BigramTable:
        """A table of average probabilities.

        ``sums`` has the summed probabilities of each token's successors, ``counts`` the number of
        rows of each token.
        """
        tokens = np.zeros((n_vocab, N_NEXT), np.int32)
        probs = np.zeros((n_vocab, N_NEXT), np.float32)
        for token, found in sums.items():
            likeliest = sorted(found.items(), key=lambda item: -item[1])[:N_NEXT]
            for i, (successor, p) in enumerate(likeliest):
                tokens[token, i], probs[token, i] = successor, p / counts[token]
        return cls(tokens, probs)

    def of(self, token: int) -> list[tuple[int, float]]:
        """Successors of ``token`` with their probabilities, in descending order."""
        row = self._rows.get(token)
        if row is None:
            row = self._rows[token] = self._from_start(token)
        return row

    def learn(self, token: int, logits: Floats) -> None:
        """Replace the successors of ``token`` with the top ones from a row's logits, (n_vocab,).

        At most eight, and none more than 3,000 times less likely than the first. Probabilities are
        normalised over these alone, which saves a softmax over the vocabulary.
        """
        tokens, values = highest(logits, N_NEXT)
        found = sorted(zip(values.tolist(), tokens.tolist(), strict=True), reverse=True)
        weights = [exp(value - found[0][0]) for value, _ in found]
        total = sum(weights)
        probs = [weight / total for weight in weights]
        self._rows[token] = [(after, p) for (_, after), p in zip(found, probs, strict=True)]

    def _from_start(self, token: int) -> list[tuple[int, float]]:
        tokens, probs = self._start
        if tokens is None or probs is None or token >= len(tokens):
            return []
        known = probs[token] > 0
        return list(zip(tokens[token][known].tolist(), probs[token][known].tolist(), strict=True))

    def save(self, path: Path, n_vocab: int) -> None:
        """Write the table for a vocabulary of ``n_vocab`` tokens, 3 or 5 bytes per successor."""
        small = np.uint16 if n_vocab <= 2**16 else np.uint32
        tokens = np.zeros((n_vocab, N_NEXT), small)
        probs = np.zeros((n_vocab, N_NEXT), np.uint8)
        for token in range(n_vocab):
            for i, (successor, p) in enumerate(self.of(token)[:N_NEXT]):
                tokens[token, i], probs[token, i] = successor, max(1, round(255 * p))
        with replacing(path) as file:
            np.savez_compressed(file, tokens=tokens, probs=probs)

    @classmethod
    def load(cls, path: Path, n_vocab: int) -> BigramTable:
        """Read a table. Raises InvalidParameter if it is unreadable or has another vocabulary."""
        try:
            with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
                tokens, probs = file["tokens"], file["probs"]
            if tokens.dtype.kind != "u" or probs.dtype != np.uint8 or tokens.ndim != 2:
                raise ValueError("its numbers are of another kind")
        except Exception as error:  # NumPy and zipfile raise anything for a damaged file
            raise InvalidParameter(f"{path} is not a bigram table: {error}; rebuild it") from None
        if tokens.shape != (n_vocab, N_NEXT) or probs.shape != tokens.shape:
            raise InvalidParameter(
                f"{path} has bigrams for {len(tokens)} tokens, but the model has {n_vocab}; "
                f"rebuild it from this model"
            )
        if tokens.max() >= n_vocab:
            raise InvalidParameter(f"{path} has unknown tokens; rebuild it")
        return cls(tokens, probs.astype(np.float32) / 255)
