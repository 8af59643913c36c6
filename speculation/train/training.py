"""The loop that trains every kind of heads, and what a kind gives for it. Needs PyTorch."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batching.llama.weights import Weights
from batching.tree import Floats
from speculation.heads.file import HeadsInfo
from speculation.train.params import TrainingParams
from speculation.train.ranks import Ints, ranks_of
from speculation.train.sequences import Batch, Sequences, batches, draft_vocab
from speculation.train.states import States

LOSS_DECAY = 0.8  # weight of a draft token's loss relative to the token before
N_DEPTHS = 6  # length of the chains whose accuracy is measured
# Logits are by far the largest tensors of a step: for 8 sequences of 512 tokens and a vocabulary of
# 152,000 they take 2.5 GB, and a step needs a dozen such tensors. So they are computed in chunks,
# and again in the backward pass (gradient checkpointing).
MAX_LOGITS = 2**26  # in one chunk; 256 MB
_WARM_UP = 0.03  # share of the steps
_FINAL_RATE = 0.05  # learning rate at the last step, as a share of its peak


@dataclass(frozen=True)
class Target:
    """What training takes from the target.

    info     its name and sizes, for the heads' file
    weights  its GGUF
    output   its output matrix, (n_vocab, n_embd)
    layers   the layers whose inputs the head reads; () = it reads states after the final norm
    """

    info: HeadsInfo
    weights: Weights
    output: Floats
    layers: tuple[int, ...] = ()

    def embeddings(self) -> Floats:
        """Its embeddings, (n_vocab, n_embd)."""
        return self.weights.tensor("token_embd.weight")


class Head(nn.Module, ABC):
    """A kind of heads in training. ``make`` in the module of its kind makes it.

    It learns the target's distribution after every token, at each depth of a chain of drafts.

    depth   length of the chains it is trained on
    """

    depth: int

    @abstractmethod
    def chains(self, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a chain of ``depth`` tokens from every position in the mask.

        Yields for each token of the chains its positions, (n,), see ``Batch.places``, and the
        inputs of the output matrix there, (n, n_embd). Ends early if no position is left.
        """

    @abstractmethod
    def write(self, path: Path, trainer: Trainer) -> None:
        """Write the heads to a file. Raises SpeculationError."""

    def noisy(self, batch: Batch) -> Batch:
        """What is trained on instead of a batch."""
        return batch

    def loss(self, ours: Tensor, wanted: Tensor, matrix: Tensor) -> Tensor:
        """The loss at one depth: our inputs of the output matrix, and the target's."""
        return distribution_loss(ours, wanted, matrix)


class Trainer:
    """Trains a head, and measures it.

    items   the sequences to train on
    tokens  the draft vocabulary, (n_drafted,); None = the whole vocabulary
    matrix  the target's output matrix for these tokens, (n_drafted, n_embd)
    """

    def __init__(
        self,
        make: Callable[[Any, States, Target], Head],
        params: TrainingParams,
        states: States,
        target: Target,
        device: str,
    ) -> None:
        """``device`` is PyTorch's name of the device to train on.

        Raises TrainError if there are too few sequences to hold one out, or no token to train on.
        """
        torch.manual_seed(params.seed)
        self.params, self.target, self.device = params, target, device
        self.head = make(params, states, target).to(device)
        self.tokens = draft_vocab(states, params.vocab, len(target.output))
        rows = target.output if self.tokens is None else target.output[self.tokens]
        self.matrix = torch.from_numpy(np.array(rows)).to(device)
        self.data = Sequences(states, device, target.embeddings(), states.inputs(target.layers))
        self.items, self._held_out = self.data.split(params.held_out)
        self._lengths = np.diff(states.ends, prepend=0).tolist()

    def batches(self) -> Iterator[list[int]]:
        """Items of each step, without end."""
        params = self.params
        return batches(self.items, params.batch, params.seed, self._lengths.__getitem__)

    def loss(self, items: list[int]) -> Tensor:
        batch = self.head.noisy(self.data.batch(items))
        after = batch.after.flatten(0, 1)
        total = torch.zeros((), device=self.device)
        for i, (places, ours) in enumerate(self.head.chains(batch, self.head.depth)):
            total = total + LOSS_DECAY**i * self.head.loss(ours, after[places], self.matrix)
        return total

    def ranks(self) -> Ints:
        """The ranks of the target's choices on held-out data, (n, depths), up to N_DEPTHS."""
        found = []
        for sequence in self._held_out:
            batch = self.data.batch([sequence])
            choices = batch.choices[0].cpu().numpy()
            ranks = np.full((len(choices), N_DEPTHS), -1, np.int64)
            for depth, (places, ours) in enumerate(self.head.chains(batch, N_DEPTHS)):
                at = places.cpu().numpy()  # of chains that began ``depth`` positions earlier
                logits = ours @ self.matrix.T
                ranks[at - depth, depth] = ranks_of(logits, choices[at], self.tokens)
            found.append(ranks[batch.mask[0].cpu().numpy()])
        every = np.concatenate(found)
        return every[:, : max(1, int((every >= 0).any(axis=0).sum()))]


def train(trainer: Trainer, progress: Callable[[int, int, float], None]) -> Ints:
    """Train for ``epochs``; return the ranks on held-out data.

    AdamW with gradient clipping. ``progress(step, n_steps, loss)`` is called after each step.
    """
    params = trainer.params
    n_steps = max(1, math.ceil(params.epochs * len(trainer.items) / params.batch))
    weights = [p for p in trainer.head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=params.rate, weight_decay=0.0)
    for step, items in enumerate(itertools.islice(trainer.batches(), n_steps)):
        optimizer.param_groups[0]["lr"] = params.rate * rate_at(step, n_steps)
        loss = trainer.loss(items)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        progress(step + 1, n_steps, loss.item())
    with torch.inference_mode():
        return trainer.ranks()


def rate_at(step: int, n_steps: int) -> float:
    """The learning rate as a share of its peak: linear warm-up, then cosine decay."""
    warm_up = max(1, int(_WARM_UP * n_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, n_steps - warm_up)
    return _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def distribution_loss(ours: Tensor, wanted: Tensor, matrix: Tensor) -> Tensor:
    """Mean cross-entropy of our logits, ``ours @ matrix.T``, with the target's distribution,
    softmax of ``wanted @ matrix.T``.

    States are (n, n_embd), the output matrix is (n_drafted, n_embd).
    """

    def of(ours: Tensor, wanted: Tensor) -> Tensor:
        p = (wanted @ matrix.T).softmax(dim=1)
        return torch.nn.functional.cross_entropy(ours @ matrix.T, p, reduction="sum")

    n = max(1, MAX_LOGITS // len(matrix))
    if len(ours) <= n:
        return of(ours, wanted) / len(ours)
    parts = zip(ours.split(n), wanted.split(n), strict=True)
    return sum(checkpoint(of, *part, use_reentrant=False) for part in parts) / len(ours)
