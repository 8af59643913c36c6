"""Padded batches of whole sequences, for training recurrent and attention heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.train import TrainError
from speculation.train.schedule import held_out_start
from speculation.train.states import States

_SORTED = 16  # batches whose sequences are sorted by length together


def draft_vocab(states: States, n: int, n_vocab: int) -> npt.NDArray[np.int32] | None:
    """The ``n`` tokens that the target chooses most often, ascending; None = the whole vocabulary.

    Heads with a reduced vocabulary draft these tokens only.
    """
    if not 0 < n < n_vocab:
        return None
    in_span = np.append(states.span_end[1:] > 0, False)  # the next token is trained on
    counts = np.bincount(np.asarray(states.choices)[in_span], minlength=n_vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:n]).astype(np.int32)


@dataclass(frozen=True)
class Batch:
    """Sequences, padded at their ends. Position i of a sequence stands for its token i + 1.

    embeddings  embeddings of the tokens, (sequences, time, n_embd)
    before      target states one token earlier, the head's input, (sequences, time, width)
    after       target states at the tokens, what the head learns, (sequences, time, n_embd)
    choices     the target's greedy choice after each token, (sequences, time)
    mask        positions that count in the loss, (sequences, time)
    """

    embeddings: Any
    before: Any
    after: Any
    choices: Any
    mask: Any


class Sequences:
    """The sequences of a collection, as batches on the training device."""

    def __init__(
        self,
        states: States,
        read: npt.NDArray[np.float16],
        embeddings: Floats,
        device: str,
    ) -> None:
        """``read``, (n, width), are the target states that the head takes as input."""
        self._states = states
        self._read = read
        self._embeddings = embeddings
        self._device = device
        self._starts = np.concatenate([[0], states.ends[:-1]])

    def loss_mask(self, sequence: int) -> npt.NDArray[np.bool_]:
        """Positions that count in the loss: those followed by a token to train on, (time,).

        The last token of a sequence has no successor, so it is False.
        """
        start, end = self._starts[sequence], self._states.ends[sequence]
        found: npt.NDArray[np.bool_] = self._states.span_end[start + 2 : end] > 0
        return np.append(found, False)[: max(0, end - start - 1)]

    def split(self, held_out: float) -> tuple[list[int], list[int]]:
        """Sequences for training and, from the end of the data, held-out ones for evaluation.

        Raises TrainError if there are too few sequences, or none with a token to train on.
        """
        first = held_out_start(self._states, held_out)
        usable = [i for i in range(len(self._states.ends)) if self.loss_mask(i).any()]
        train = [i for i in usable if self._states.ends[i] <= first]
        if not train:
            raise TrainError("the data has no token to train on; give longer texts")
        return train, usable[len(train) :]

    def batch(self, sequences: Sequence[int]) -> Batch:
        import torch

        time = max(int(self._states.ends[i] - self._starts[i]) for i in sequences) - 1
        n_embd = self._states.hidden.shape[1]
        embeddings, after = np.zeros((2, len(sequences), time, n_embd), np.float32)
        before = np.zeros((len(sequences), time, self._read.shape[1]), np.float32)
        mask = np.zeros((len(sequences), time), bool)
        choices = np.zeros((len(sequences), time), np.int64)
        for i, sequence in enumerate(sequences):
            start, end = int(self._starts[sequence]), int(self._states.ends[sequence])
            n = end - start - 1
            embeddings[i, :n] = self._embeddings[self._states.tokens[start + 1 : end]]
            after[i, :n] = self._states.hidden[start + 1 : end]
            before[i, :n] = self._read[start : end - 1]
            mask[i, :n] = self.loss_mask(sequence)
            choices[i, :n] = self._states.choices[start + 1 : end]
        arrays = (embeddings, before, after, choices, mask)
        return Batch(*[torch.from_numpy(array).to(self._device) for array in arrays])


def batches(
    sequences: Sequence[int], lengths: Sequence[int], size: int, n: int, seed: int
) -> Iterator[list[int]]:
    """``n`` shuffled batches of ``size`` sequences of similar length, epoch after epoch.

    Similar lengths save padding, so ``_SORTED`` batches at a time are sorted by length.
    """
    rng = np.random.default_rng(seed)
    ready: list[list[int]] = []
    for _ in range(n):
        if not ready:
            order = rng.permutation(sequences).tolist()
            for first in range(0, len(order), size * _SORTED):
                chunk = sorted(order[first : first + size * _SORTED], key=lambda i: lengths[i])
                ready += [chunk[i : i + size] for i in range(0, len(chunk), size)]
            rng.shuffle(ready)
        yield ready.pop()
