"""BigramTable: for every token the tokens that the model thought likeliest after it."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.tree import Floats

N_NEXT = 8  # tokens kept after each
# What NumPy raises for a file that is cut, damaged, or an array and no archive of some.
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
_FURTHEST = 8.0  # logits below the highest: e^8 is 3,000


class BigramTable:
    """For every token its likeliest successors: ids and probabilities, the likeliest first.

    Kept in memory only. What a text adds replaces what stood there for the token.
    """

    def __init__(
        self, tokens: npt.NDArray[np.integer] | None = None, probs: Floats | None = None
    ) -> None:
        """Start empty, or from ``tokens`` and ``probs``, both (n_vocab, k); 0 = nothing known."""
        self._start = (tokens, probs)
        self._rows: dict[int, list[tuple[int, float]]] = {}

    @classmethod
    def of_sums(
        cls, sums: Mapping[int, Mapping[int, float]], counts: Mapping[int, int], n_vocab: int
    ) -> BigramTable:
        """From the probabilities that rows of each token gave its successors, summed, and the
        number of those rows."""
        tokens = np.zeros((n_vocab, N_NEXT), np.int32)
        probs = np.zeros((n_vocab, N_NEXT), np.float32)
        for token, found in sums.items():
            likeliest = sorted(found.items(), key=lambda item: -item[1])[:N_NEXT]
            for i, (successor, p) in enumerate(likeliest):
                tokens[token, i], probs[token, i] = successor, p / counts[token]
        return cls(tokens, probs)

    def of(self, token: int) -> list[tuple[int, float]]:
        """Successors of ``token`` with their probabilities, which fall."""
        row = self._rows.get(token)
        if row is None:
            row = self._rows[token] = self._from_start(token)
        return row

    def learn(self, token: int, logits: Floats) -> None:
        """Take the successors of ``token`` from the logits of a row, (n_vocab,).

        At most eight, none less likely than the first by a factor of 3,000. Probabilities are among
        these alone: the rest of the vocabulary is not summed up.
        """
        peak = logits.max()
        top = np.flatnonzero(logits > peak - _FURTHEST)  # mostly few: no need to sort the rest
        values = logits[top]
        if len(top) > N_NEXT:
            likeliest = values.argpartition(-N_NEXT)[-N_NEXT:]
            top, values = top[likeliest], values[likeliest]
        order = values.argsort()[::-1]
        weights = np.exp(values[order] - peak)
        weights /= weights.sum()
        self._rows[token] = list(zip(top[order].tolist(), weights.tolist(), strict=True))

    def _from_start(self, token: int) -> list[tuple[int, float]]:
        tokens, probs = self._start
        if tokens is None or probs is None or token >= len(tokens):
            return []
        known = probs[token] > 0
        return list(zip(tokens[token][known].tolist(), probs[token][known].tolist(), strict=True))

    def save(self, path: Path, n_vocab: int) -> None:
        """Write the table for a vocabulary of ``n_vocab`` tokens, 3 bytes a successor or 5.

        The file appears when it is whole.
        """
        small = np.uint16 if n_vocab <= 2**16 else np.uint32
        tokens = np.zeros((n_vocab, N_NEXT), small)
        probs = np.zeros((n_vocab, N_NEXT), np.uint8)
        for token in range(n_vocab):
            for i, (successor, p) in enumerate(self.of(token)[:N_NEXT]):
                tokens[token, i], probs[token, i] = successor, max(1, round(255 * p))
        partial = path.with_name(f"{path.name}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, tokens=tokens, probs=probs)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, n_vocab: int) -> BigramTable:
        """Read a table. Raises InvalidParameter when it is none, or of another vocabulary."""
        try:
            with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
                tokens, probs = file["tokens"], file["probs"]
        except _UNREADABLE as error:
            raise InvalidParameter(f"{path} is no bigram table: {error}; make it anew") from None
        if tokens.shape != (n_vocab, N_NEXT) or probs.shape != tokens.shape:
            raise InvalidParameter(
                f"{path} holds bigrams for {len(tokens)} tokens, the model has {n_vocab}; "
                f"make it anew from this model"
            )
        return cls(tokens, probs.astype(np.float32) / 255)
