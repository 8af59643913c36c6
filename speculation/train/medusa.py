"""Trains Medusa heads on collected states.

From the hidden state at token t, head k learns the target's distribution after token t + 1 + k, as
in the self-distillation of Medusa (Cai et al. 2024, arXiv 2401.10774), whatever the tokens between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculation.heads.file import HeadsWeights
from speculation.heads.medusa import write_medusa
from speculation.train.params import MedusaTraining
from speculation.train.sequences import Batch
from speculation.train.states import States
from speculation.train.training import Head, Target, Trainer


class MedusaHeads(Head):
    """The residual blocks of all heads."""

    def __init__(self, params: MedusaTraining, states: States, target: Target) -> None:
        super().__init__()
        self.depth, n_embd = params.heads, states.hidden.shape[1]
        shape = (params.heads, params.blocks, n_embd, n_embd)
        self.matrices = nn.Parameter(torch.zeros(shape))  # initially the heads add nothing
        self.biases = nn.Parameter(torch.zeros(shape[:-1]))

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """The input of the output matrix, from states (n, n_embd)."""
        for matrix, bias in zip(self.matrices[head], self.biases[head], strict=True):
            hidden = hidden + F.silu(hidden @ matrix.T + bias)
        return hidden

    def chains(self, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        places, continues = batch.places(), batch.continues()
        hidden = batch.before.flatten(0, 1)[places]
        for head in range(min(depth, self.depth)):
            yield places, self(hidden, head)
            alive = continues[places]
            places, hidden = places[alive] + 1, hidden[alive]
            if not len(places):
                return

    def write(self, path: Path, trainer: Trainer) -> None:
        tensors = {
            f"head.{head}.block.{block}.{part}": values
            for part, of in (("weight", self.matrices), ("bias", self.biases))
            for head, blocks in enumerate(of.detach().cpu().numpy())
            for block, values in enumerate(blocks)
        }
        weights = HeadsWeights(tensors, trainer.matrix.cpu().numpy(), trainer.tokens)
        write_medusa(path, trainer.target.info, weights)


make = MedusaHeads
