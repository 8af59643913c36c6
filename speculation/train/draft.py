"""Trains a small draft model for a target on collected states.

The draft model is a Llama of a few narrow layers with the target's tokenizer. It learns the
target's distribution after every token of the target's own text (distillation, as in DistillSpec,
Zhou et al. 2023, arXiv 2310.08461), computed from the collected states.

In a small model most of the work is the output matrix of a large vocabulary. So only the rows of
the tokens that the target chooses most often are trained. The other rows are 0 and give the logit
0, which the loss counts: what the model says of a token's probability is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batching.gguf.writer import FILE_TYPES, QUANTIZATION_VERSION, write_gguf
from batching.tree import Floats
from speculation.heads.file import copied_tokenizer, new_tensor
from speculation.train.layer import DraftModule
from speculation.train.params import DraftTraining
from speculation.train.ranks import Ints
from speculation.train.sequences import Batch
from speculation.train.states import States
from speculation.train.training import ChainTrainer, Target


class DraftTrainer(ChainTrainer[DraftTraining]):
    def __init__(self, params: DraftTraining, states: States, target: Target, device: str) -> None:
        super().__init__(params, states, target, device)
        self.n_zero = len(target.output) - len(self.matrix)
        own = torch.from_numpy(_principal(target.embeddings(), params.width))
        self.module = DraftModule(params.shape, params.layers, own, self.tokens).to(device)

    @property
    def output(self) -> Tensor:
        return self.module.output.weight

    def chains(self, batch: Batch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        # In its own text the target's choices are the tokens that follow, so after correct drafts
        # the model has read just this, whatever their number.
        states = self.module(batch.tokens).flatten(0, 1)
        for i in range(depth):
            places = batch.places(skip=i)
            yield places, states[places]

    def write(self, path: Path, ranks: Ints) -> None:
        write_draft(path, self.params, self.module.tensors(), self.target)

    def report(self, ranks: Ints) -> str:
        n_parameters = sum(tensor.size for tensor in self.module.tensors().values())
        return f"{super().report(ranks)}\n\n{n_parameters / 1e6:.1f} million parameters"


def write_draft(
    path: Path, params: DraftTraining, tensors: dict[str, Floats], target: Target
) -> None:
    """Write a draft model, ``tensors`` by llama.cpp's names, with the target's tokenizer.

    The file is written to a temporary name and renamed. Raises DiskFull.
    """
    own = target.weights.metadata
    n_ctx = own[f"{own['general.architecture']}.context_length"]
    metadata = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": f"Draft model for {target.info.target_name}",
        "general.file_type": FILE_TYPES[params.kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        **params.shape.metadata("llama", params.layers, target.info.n_vocab, n_ctx),
        **copied_tokenizer(target.weights),
    }
    write_gguf(path, metadata, {name: new_tensor(of, params.kind) for name, of in tensors.items()})


def _principal(embeddings: Floats, width: int) -> Floats:
    """The principal components of ``embeddings``, (n_vocab, width), of root mean square 1 / √width.

    A model wider than the target gets zeros beyond them.
    """
    values, vectors = np.linalg.eigh(embeddings.T @ embeddings)
    order = np.argsort(-values)[:width]
    found = np.zeros((len(embeddings), width), np.float32)
    found[:, : len(order)] = embeddings @ vectors[:, order]
    return found / (np.sqrt((found**2).mean()) * math.sqrt(width)).astype(np.float32)
