"""Trains Medusa heads on collected states.

From the hidden state at token t, head k learns the target's greedy choice after token t + 1 + k.
The labels are the target's choices, not the text's tokens, because verification compares with the
target. Each head's loss weighs 0.8 of the one before (Medusa, Cai et al. 2024, arXiv 2401.10774).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculation.heads.file import HeadsWeights
from speculation.heads.medusa import write_medusa
from speculation.train.params import MedusaTraining
from speculation.train.ranks import NONE, Ints, columns_of, ranks_of
from speculation.train.sequences import held_out_start, labels_of
from speculation.train.states import States
from speculation.train.training import LOSS_DECAY, MAX_LOGITS, Target, Trainer


class MedusaModule(nn.Module):
    """The heads: states (n, n_embd) -> logits (n, n_heads, n_drafted)."""

    def __init__(self, params: MedusaTraining, output: Tensor) -> None:
        """``output`` is the target's output matrix, (n_drafted, n_embd)."""
        super().__init__()
        n_embd = output.shape[1]
        self.output = output
        shape = (params.blocks, params.heads, n_embd, n_embd)
        self.n_heads = params.heads
        self.matrices = nn.Parameter(torch.zeros(shape))  # initially the heads add nothing
        self.biases = nn.Parameter(torch.zeros(shape[:-1]))

    def forward(self, hidden: Tensor) -> Tensor:
        state = hidden.expand(self.n_heads, -1, -1)  # (n_heads, n, n_embd)
        for matrix, bias in zip(self.matrices, self.biases, strict=True):
            state = state + F.silu(state @ matrix.mT + bias[:, None])
        return (state @ self.output.mT).transpose(0, 1)


class MedusaTrainer(Trainer[MedusaTraining]):
    def __init__(self, params: MedusaTraining, states: States, target: Target, device: str) -> None:
        super().__init__(params, states, target, device)
        self.module = MedusaModule(params, self.matrix).to(device)
        self._labels = labels_of(states, params.heads)
        self._columns = columns_of(self._labels, self.tokens)
        self._first_held_out = held_out_start(states, params.held_out)
        learnt = (self._columns[: self._first_held_out] != NONE).any(axis=1)
        self.items = np.flatnonzero(learnt).tolist()
        decay = LOSS_DECAY ** torch.arange(params.heads, device=device)
        self._weights = decay / decay.sum()

    def loss(self, items: list[int]) -> Tensor:
        rows = np.sort(items)
        wanted = torch.from_numpy(self._columns[rows]).to(self.device)
        losses = F.cross_entropy(
            self._logits(rows).flatten(0, 1), wanted.flatten(), ignore_index=NONE, reduction="none"
        )
        n_labels = (wanted != NONE).sum(dim=0).clamp(min=1)
        return (losses.view(wanted.shape).sum(dim=0) / n_labels * self._weights).sum()

    def _logits(self, rows: Ints) -> Tensor:
        hidden = self.states.hidden[rows].astype(np.float32)
        return self.module(torch.from_numpy(hidden).to(self.device))

    def ranks(self) -> Ints:
        n = max(1, min(1024, MAX_LOGITS // (self.params.heads * len(self.matrix))))
        found = []
        for start in range(self._first_held_out, len(self.states), n):
            labels = self._labels[start : start + n]
            logits = self._logits(np.arange(start, start + len(labels)))
            ranks = ranks_of(logits.flatten(0, 1), labels.ravel(), self.tokens)
            found.append(ranks.reshape(labels.shape))
        return np.concatenate(found)

    def write(self, path: Path) -> None:
        tensors = {}
        for part, of in (("weight", self.module.matrices), ("bias", self.module.biases)):
            for block, heads in enumerate(of.detach().cpu().numpy()):
                for head, values in enumerate(heads):
                    tensors[f"head.{head}.block.{block}.{part}"] = values
        output = self.matrix.cpu().numpy()
        write_medusa(path, self.target.info, HeadsWeights(tensors, output, self.tokens))
