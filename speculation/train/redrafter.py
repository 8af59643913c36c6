"""Trains a ReDrafter head on collected states.

From the hidden state at token t and the actual tokens that follow, the head learns the target's
distribution after tokens t + 1, t + 2, and so on: the knowledge distillation of ReDrafter (Cheng et
al. 2024, arXiv 2403.09919).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor, nn

from speculation.heads.file import HeadsWeights
from speculation.heads.redrafter import write_redrafter
from speculation.train.layer import arrays_of
from speculation.train.params import ReDrafterTraining
from speculation.train.sequences import Batch
from speculation.train.states import States
from speculation.train.training import Head, Target, Trainer


def make(params: ReDrafterTraining, states: States, target: Target) -> Head:
    embeddings = target.embeddings()
    size = float(np.sqrt((embeddings**2).mean()))
    return ReDrafterModule(params, embeddings.shape[1], size)


class ReDrafterModule(Head):
    """The head; ``speculation.heads.redrafter`` has its formulas."""

    def __init__(self, params: ReDrafterTraining, n_embd: int, size: float) -> None:
        """``size`` is the root mean square of the target's embeddings."""
        super().__init__()
        self.n_embd, self.depth = n_embd, params.length
        self.token = nn.Linear(n_embd, n_embd)  # its bias serves the recurrence too
        self.recurrent = nn.Linear(n_embd, n_embd, bias=False)
        self.mixing = nn.Linear(2 * n_embd, n_embd)
        self.blocks = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(params.blocks))
        for linear in (self.token, self.recurrent, self.mixing, *self.blocks):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.token.weight, std=n_embd**-0.5 / size)
        self.projection = nn.Linear(n_embd, n_embd, bias=False)
        nn.init.zeros_(self.projection.weight)  # initially the head adds nothing

    def chains(self, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A chain ends before the first position outside the mask."""
        continues = batch.continues()
        places = batch.places()
        hidden = batch.before.flatten(0, 1)
        token_input = self.token(batch.embeddings.flatten(0, 1))
        hidden = hidden[places]
        hidden_input = hidden @ self.mixing.weight[:, self.n_embd :].T + self.mixing.bias
        state = None
        for _ in range(depth):
            summed = token_input[places]
            if state is not None:
                summed = summed + self.recurrent(state)
            state = F.silu(summed)
            u = F.silu(state @ self.mixing.weight[:, : self.n_embd].T + hidden_input)
            for block in self.blocks:
                u = u + F.silu(block(u))
            yield places, hidden + self.projection(u)
            alive = continues[places]
            places, state = places[alive] + 1, state[alive]
            hidden, hidden_input = hidden[alive], hidden_input[alive]
            if not len(places):
                return

    def weights(self, output: Tensor, tokens: npt.NDArray[np.int32] | None) -> HeadsWeights:
        tensors = {name.replace("blocks.", "block."): of for name, of in arrays_of(self).items()}
        tensors["recurrent.bias"] = tensors.pop("token.bias")
        return HeadsWeights(tensors, output.cpu().numpy(), tokens)

    def write(self, path: Path, trainer: Trainer) -> None:
        weights = self.weights(trainer.matrix, trainer.tokens)
        write_redrafter(path, trainer.target.info, weights)
