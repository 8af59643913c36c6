"""Whole pieces of a collection as batches, for heads that learn along the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.train import TrainError
from speculation.train.schedule import held_out_from
from speculation.train.states import States

_SORTED = 16  # batches' worth of pieces that are sorted by length


def drafted(states: States, n: int, n_vocab: int) -> npt.NDArray[np.int32] | None:
    """The ``n`` tokens that the target chooses most often, ascending; None for all."""
    if not 0 < n < n_vocab:
        return None
    own = np.append(states.until[1:] > 0, False)  # the target itself goes on from there
    counts = np.bincount(np.asarray(states.choices)[own], minlength=n_vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:n]).astype(np.int32)


@dataclass(frozen=True)
class Batch:
    """Pieces of text, padded at their ends. Place i of a piece stands for its token i + 1.

    embeddings  of the tokens, (pieces, time, n_embd)
    before      what is read of the target before them, (pieces, time, width)
    after       and after them, which are to be learnt
    choices     what the target would say after them, (pieces, time)
    learnt      where that is to be learnt from, (pieces, time)
    """

    embeddings: Any
    before: Any
    after: Any
    choices: Any
    learnt: Any


class Sequences:
    """Batches of a collection, on the device that trains."""

    def __init__(
        self,
        states: States,
        read: npt.NDArray[np.float16],
        embeddings: Floats,
        device: str,
    ) -> None:
        """``read``, (n, width), is what the head reads of the target."""
        self._states = states
        self._read = read
        self._embeddings = embeddings
        self._device = device
        self._starts = np.concatenate([[0], states.ends[:-1]])

    def learnt(self, piece: int) -> npt.NDArray[np.bool_]:
        """By place: whether the token after it is the target's own, (time,).

        Of the last token of a piece nobody knows.
        """
        start, end = self._starts[piece], self._states.ends[piece]
        found: npt.NDArray[np.bool_] = self._states.until[start + 2 : end] > 0
        return np.append(found, False)[: max(0, end - start - 1)]

    def split(self, held_out: float) -> tuple[list[int], list[int]]:
        """The pieces to learn from, and those that heads are judged by, the last ones.

        Raises TrainError when there are too few, or no token is to be learnt from.
        """
        first = held_out_from(self._states, held_out)
        some = [i for i in range(len(self._states.ends)) if self.learnt(i).any()]
        learnt = [i for i in some if self._states.ends[i] <= first]
        if not learnt:
            raise TrainError("no token of the data can be learnt from; give longer texts")
        return learnt, some[len(learnt) :]

    def batch(self, pieces: Sequence[int]) -> Batch:
        import torch

        time = max(int(self._states.ends[p] - self._starts[p]) for p in pieces) - 1
        n_embd = self._states.hidden.shape[1]
        wide = np.zeros((2, len(pieces), time, n_embd), np.float32)
        before = np.zeros((len(pieces), time, self._read.shape[1]), np.float32)
        learnt = np.zeros((len(pieces), time), bool)
        choices = np.zeros((len(pieces), time), np.int64)
        for i, piece in enumerate(pieces):
            start, end = int(self._starts[piece]), int(self._states.ends[piece])
            n = end - start - 1
            wide[0, i, :n] = self._embeddings[self._states.tokens[start + 1 : end]]
            wide[1, i, :n] = self._states.hidden[start + 1 : end]
            before[i, :n] = self._read[start : end - 1]
            learnt[i, :n] = self.learnt(piece)
            choices[i, :n] = self._states.choices[start + 1 : end]
        arrays = (wide[0], before, wide[1], choices, learnt)
        return Batch(*[torch.from_numpy(array).to(self._device) for array in arrays])


def batches(
    pieces: Sequence[int], lengths: Sequence[int], size: int, n: int, seed: int
) -> Iterator[list[int]]:
    """``n`` batches of ``size`` pieces, each piece once in a while and with others as long.

    A batch is padded to its longest, so a few dozen batches' worth at a time is sorted by length.
    """
    rng = np.random.default_rng(seed)
    ready: list[list[int]] = []
    for _ in range(n):
        if not ready:
            order = rng.permutation(pieces).tolist()
            for first in range(0, len(order), size * _SORTED):
                some = sorted(order[first : first + size * _SORTED], key=lambda i: lengths[i])
                ready += [some[i : i + size] for i in range(0, len(some), size)]
            rng.shuffle(ready)
        yield ready.pop()
