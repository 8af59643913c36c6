"""Trains EAGLE heads on collected states.

From a token and the target's hidden state before it, the head predicts the hidden state after it.
The loss is smooth L1 on the states plus cross-entropy with the target's distribution, and the input
states get noise, so that the head tolerates its own predictions as input (EAGLE, Li et al. 2024,
arXiv 2401.15077). The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) reads the inputs of three
layers instead and learns from the distribution alone. ``layer`` explains how both learn to continue
from their own predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batching.llama.weights import Weights
from speculation.heads.eagle import EagleShape, write_eagle
from speculation.heads.eagle3 import write_eagle3
from speculation.train.layer import Eagle3Module, EagleModule
from speculation.train.params import EagleTraining
from speculation.train.sequences import Batch
from speculation.train.states import States
from speculation.train.training import Head, Target, Trainer

_SAMPLED = 4096  # states from which sizes are measured


def shape_for(target: Weights, n_embd: int, n_ff: int = 0) -> EagleShape:
    """The shape of the target's own layers, with its head counts adjusted to divide the width.

    n_embd  width of the target's states
    n_ff    width of the feed-forward block; 0 = the target's
    """
    architecture = target.metadata.get("general.architecture")

    def of(key: str, default: float) -> float:
        value = target.metadata.get(f"{architecture}.{key}")
        # A list has one value per layer.
        return value if isinstance(value, int | float) else default

    n_head = int(of("attention.head_count", 0))
    if n_head < 1 or n_embd % (2 * n_head):
        n_head = next(n for n in (n_embd // 128, n_embd // 64, 1) if n and n_embd % (2 * n) == 0)
    n_head_kv = int(of("attention.head_count_kv", n_head))
    if n_head_kv < 1 or n_head % n_head_kv:
        n_head_kv = n_head
    n_ff = n_ff or int(of("feed_forward_length", 0)) or 4 * n_embd
    return EagleShape(n_embd, n_head, n_head_kv, n_ff, float(of("rope.freq_base", 10_000.0)))


class EagleHead(Head):
    """A head for EAGLE-1 and -2, or for EAGLE-3 if ``target`` has layers that it reads."""

    def __init__(self, params: EagleTraining, states: States, target: Target) -> None:
        super().__init__()
        self.depth, self.params, self.is_eagle3 = params.passes, params, bool(target.layers)
        self.shape = shape_for(target.weights, target.info.n_embd, params.ff)
        self.scale = float(_rms(states.hidden, None))
        # By component: in the inputs of layers they differ by orders of magnitude.
        sizes = torch.from_numpy(_rms(states.inputs(target.layers), 0) + 1e-6)
        self.noise: Tensor
        self.register_buffer("noise", params.noise * sizes)
        self.module: EagleModule | Eagle3Module = EagleModule(self.shape, self.scale)
        if self.is_eagle3:
            norm = torch.from_numpy(target.weights.tensor("output_norm.weight"))
            self.module = Eagle3Module(self.shape, norm, sizes)

    def noisy(self, batch: Batch) -> Batch:
        noise = self.noise * (torch.rand_like(batch.before) * 2 - 1)
        return replace(batch, before=batch.before + noise)

    def chains(self, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        predictions = self.module(batch.embeddings, batch.before, depth)
        for s, prediction in enumerate(predictions):
            places = batch.places(skip=s)  # these are meaningless in pass s, see ``layer.attend``
            if not len(places):
                return
            yield places, self.module.read(prediction.flatten(0, 1)[places])

    def loss(self, ours: Tensor, wanted: Tensor, matrix: Tensor) -> Tensor:
        loss = super().loss(ours, wanted, matrix)
        if self.params.states and not self.is_eagle3:
            states = F.smooth_l1_loss(ours / self.scale, wanted / self.scale)
            loss = loss + self.params.states * states
        return loss

    def write(self, path: Path, trainer: Trainer) -> None:
        target, tokens, kind = trainer.target, trainer.tokens, self.params.kind
        tensors = self.module.tensors()
        if not self.is_eagle3:
            write_eagle(path, target.info, self.shape, tensors, tokens=tokens, kind=kind)
            return
        if tokens is not None:
            tensors["output.weight"] = target.output[tokens]
        write_eagle3(
            path, target.info, self.shape, tensors, target.layers, target.weights, tokens, kind
        )


make = EagleHead


def _rms(states: np.ndarray, axis: int | None) -> np.ndarray:
    """Root mean square of the first states."""
    return np.sqrt((states[:_SAMPLED].astype(np.float32) ** 2).mean(axis=axis))
