"""Which sequences are trained on and which are held out, and padded batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.train import TrainError
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
    """Sequences, padded at their ends, as tensors. A position stands for a token.

    embeddings  of the tokens, (sequences, time, n_embd)
    before      target states one token earlier, a head's input, (sequences, time, width)
    after       target states at the tokens, what is learnt, (sequences, time, n_embd)
    choices     the target's greedy choice after each token, (sequences, time)
    mask        positions that count in the loss, (sequences, time)
    """

    embeddings: Any
    before: Any
    after: Any
    choices: Any
    mask: Any

    def places(self, skip: int = 0) -> Any:
        """Positions in the mask, but for the first ``skip`` of each sequence: indices into
        flattened (sequences × time)."""
        mask = self.mask.clone()
        mask[:, :skip] = False
        return mask.flatten().nonzero().squeeze(1)

    def continues(self) -> Any:
        """Whether the next position is in the mask, too: (sequences × time,)."""
        time = self.mask.shape[1]
        found = self.mask.flatten().roll(-1)
        found[time - 1 :: time] = False  # the next position is in another sequence
        return found


class Sequences:
    """The sequences of a collection, as batches on the training device."""

    def __init__(
        self, states: States, device: str, embeddings: Floats, read: npt.NDArray[np.float16]
    ) -> None:
        """``embeddings``, (n_vocab, n_embd), and target states ``read``, (n, width), are what a
        head takes as input.

        A head's position reads the state before its token, so a sequence's first token has none.
        """
        self._states = states
        self._device = device
        self._embeddings = embeddings
        self._read = read
        self._starts = np.minimum(np.append(0, states.ends[:-1]) + 1, states.ends)
        # A position counts if its token is followed by one to train on.
        self._mask = np.append(states.span_end[1:] > 0, False)
        self._mask[states.ends - 1] = False

    def loss_mask(self, sequence: int) -> npt.NDArray[np.bool_]:
        """Positions that count in the loss, (time,)."""
        return self._mask[self._starts[sequence] : self._states.ends[sequence]]

    def split(self, held_out: float) -> tuple[list[int], list[int]]:
        """Sequences for training and, from the end of the data, a share of ``held_out`` ones for
        evaluation, at least one.

        Those without a token to train on are in neither: a prompt without room for a reply has
        none. Raises TrainError if there are too few others.
        """
        usable = [i for i in range(len(self._states.ends)) if self.loss_mask(i).any()]
        n = max(1, round(held_out * len(usable)))
        if not usable:
            raise TrainError("the data has no token to train on; give longer texts")
        if len(usable) <= n:
            raise TrainError("the data has only one sequence, and one must be held out; give more")
        return usable[:-n], usable[-n:]

    def batch(self, sequences: Sequence[int]) -> Batch:
        states = self._states
        tokens = self._padded(sequences, states.tokens, np.int64)
        return Batch(
            self._tensor(self._embeddings[tokens]),
            self._tensor(self._padded(sequences, self._read, np.float32, shift=1)),
            self._tensor(self._padded(sequences, states.hidden, np.float32)),
            self._tensor(self._padded(sequences, states.choices, np.int64)),
            self._tensor(self._padded(sequences, self._mask, np.bool_)),
        )

    def _padded(
        self,
        sequences: Sequence[int],
        values: npt.NDArray[Any],
        dtype: type[np.generic],
        shift: int = 0,
    ) -> npt.NDArray[Any]:
        """The values at all positions, or ``shift`` tokens before: (sequences, time, ...)."""
        bounds = [(self._starts[i], self._states.ends[i]) for i in sequences]
        time = max(end - start for start, end in bounds)
        found = np.zeros((len(bounds), time, *values.shape[1:]), dtype)
        for row, (start, end) in zip(found, bounds, strict=True):
            row[: end - start] = values[start - shift : end - shift]
        return found

    def _tensor(self, array: npt.NDArray[Any]) -> Any:
        import torch

        return torch.from_numpy(array).to(self._device)


def batches(
    items: Sequence[int], size: int, seed: int, length: Callable[[int], int] = lambda item: 1
) -> Iterator[list[int]]:
    """Shuffled batches of ``size`` items of similar ``length``, epoch after epoch, without end.

    Similar lengths save padding, so ``_SORTED`` batches at a time are sorted by length.
    """
    rng = np.random.default_rng(seed)
    while True:
        ready: list[list[int]] = []
        order = rng.permutation(items).tolist()
        for first in range(0, len(order), size * _SORTED):
            chunk = sorted(order[first : first + size * _SORTED], key=length)
            ready += [chunk[i : i + size] for i in range(0, len(chunk), size)]
        rng.shuffle(ready)
        yield from reversed(ready)
