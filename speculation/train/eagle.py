"""Trains EAGLE heads on collected states, in PyTorch.

From a token and the target's hidden state before it, the head predicts the hidden state after it.
The loss is smooth L1 on the states plus cross-entropy with the target's distribution, and the input
states get noise, so that the head tolerates its own predictions as input (EAGLE, Li et al. 2024,
arXiv 2401.15077). The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) reads the inputs of three
layers instead and learns from the distribution alone. ``layer`` explains how both learn to continue
from their own predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads.eagle import EagleShape
from speculation.ranges import check_ranges
from speculation.train import TrainError
from speculation.train.loss import distribution_loss
from speculation.train.ranks import Ints, chain_accuracy, ranks_of
from speculation.train.schedule import ScheduledAdamW
from speculation.train.sequences import Sequences, batches, draft_vocab
from speculation.train.states import States

KINDS = ("f32", "f16", "q8_0")
N_DEPTHS = 6  # length of the chains whose accuracy is measured
_LOSS_DECAY = 0.8  # weight of a pass's loss relative to the pass before
_N_EVALUATED = 64  # held-out sequences used for the evaluation


@dataclass(frozen=True)
class EagleTraining:
    """Parameters of EAGLE training.

    ff        width of the feed-forward block; 0 = the target's
    vocab     draft vocabulary: the most frequent tokens in the data; 0 = all tokens
    passes    passes over a sequence, each on the head's predictions from the pass before
    states    weight of the loss on hidden states; EAGLE-3 does not use it
    noise     uniform noise added to the input states, relative to their size
    epochs    passes over the data
    batch     sequences per step
    rate      peak learning rate
    held_out  share of the sequences held out for evaluation, from the end of the data
    kind      tensor type of the matrices: f32, f16 or q8_0
    seed      random seed
    """

    ff: int = 0
    vocab: int = 0
    passes: int = 3
    states: float = 1.0
    noise: float = 0.1
    epochs: float = 8.0
    batch: int = 8
    rate: float = 1e-3
    held_out: float = 0.05
    kind: str = "q8_0"
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("ff", 0, 2**20),
                ("vocab", 0, 2**31),
                ("passes", 1, 8),
                ("states", 0.0, 1000.0),
                ("noise", 0.0, 10.0),
                ("epochs", 0.0, 1000.0),
                ("batch", 1, 2**20),
                ("rate", 0.0, 1.0),
                ("held_out", 0.001, 0.5),
                ("seed", 0, 2**32 - 1),
            ),
        )
        if self.kind not in KINDS:
            raise InvalidParameter(f"kind is {self.kind!r}; give one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class TrainedEagle:
    """A trained head and its accuracy on held-out sequences.

    tensors     by their names in the file
    tokens      its draft vocabulary, (n_drafted,); None = all tokens
    accuracy    of a chain, (N_DEPTHS, N_RANKS); see ``chain_accuracy``
    n_held_out  states it was measured on
    """

    shape: EagleShape
    tensors: dict[str, Floats]
    tokens: npt.NDArray[np.int32] | None
    accuracy: Floats
    n_held_out: int


def shape_for(model: Model, ff: int = 0) -> EagleShape:
    """The shape of the target's own layers, with its head counts adjusted to divide the width."""
    architecture = model.metadata("general.architecture")

    def of(key: str, default: float) -> float:
        value = model.metadata(f"{architecture}.{key}")
        try:
            return float(value) if value is not None else default
        except ValueError:  # a list with one value per layer
            return default

    n_embd = model.n_embd_out
    n_head = int(of("attention.head_count", 0))
    if n_head < 1 or n_embd % (2 * n_head):
        n_head = next(n for n in (n_embd // 128, n_embd // 64, 1) if n and n_embd % (2 * n) == 0)
    n_head_kv = int(of("attention.head_count_kv", n_head))
    if n_head_kv < 1 or n_head % n_head_kv:
        n_head_kv = n_head
    n_ff = ff or int(of("feed_forward_length", 0)) or 4 * n_embd
    base = of("rope.freq_base", 10_000.0)
    return EagleShape(n_embd, n_head, n_head_kv, n_ff, base)


def default_layers(model: Model) -> tuple[int, int, int]:
    """The layers that EAGLE-3's authors and llama.cpp's converter use: 2, n / 2 and n - 3.

    Clamped for models with few layers.
    """
    n = model.n_layer
    return min(2, n - 1), n // 2, max(n - 3, 0)


def train_eagle(
    states: States,
    embeddings: Floats,
    output: Floats,
    shape: EagleShape,
    params: EagleTraining,
    device: str = "cpu",
    progress: Callable[[int, int, float], None] | None = None,
    *,
    output_norm: Floats | None = None,
) -> TrainedEagle:
    """Train a head on ``states``; ``embeddings`` and ``output`` are the target's matrices.

    Both are (n_vocab, n_embd). ``output_norm``, the weight of the target's final norm, (n_embd,),
    selects EAGLE-3; its states must have been collected with ``layers``.

    ``progress(step, n_steps, loss)`` is called after each step. Raises TrainError if there are too
    few sequences to hold one out, or no token to train on.
    """
    import torch

    from speculation.train.layer import Eagle3Module, EagleModule, tensors_of

    torch.manual_seed(params.seed)
    read = states.hidden if output_norm is None else states.layers
    if read is None:
        raise TrainError("the states were collected without the inputs of layers; collect again")
    data = Sequences(states, read, embeddings, device)
    train, held_out = data.split(params.held_out)
    tokens = draft_vocab(states, params.vocab, len(output))
    matrix = torch.from_numpy(np.array(output if tokens is None else output[tokens])).to(device)
    scale = _rms(states.hidden)
    # By component: in the inputs of layers they differ by orders of magnitude.
    sizes = np.sqrt((read[:4096].astype(np.float32) ** 2).mean(axis=0)) + 1e-6
    noise = torch.from_numpy(params.noise * sizes).to(device)
    model: Any
    if output_norm is None:
        model = EagleModule(shape, scale).to(device)
    else:
        norm = torch.from_numpy(output_norm)
        model = Eagle3Module(shape, norm, torch.from_numpy(sizes)).to(device)
    weight = params.states if output_norm is None else 0.0
    n_steps = max(1, math.ceil(params.epochs * len(train) / params.batch))
    optimizer = ScheduledAdamW(model.parameters(), params.rate, n_steps, progress)
    lengths = np.diff(states.ends, prepend=0).tolist()
    for sequences in batches(train, lengths, params.batch, n_steps, params.seed):
        batch = data.batch(sequences)
        before = batch.before + noise * (torch.rand_like(batch.before) * 2 - 1)
        guesses = model(batch.embeddings, before, params.passes)
        loss: Any = 0.0
        for s, guess in enumerate(guesses):
            mask = batch.mask.clone()
            mask[:, :s] = False  # chains of s tokens start at position s
            wanted, ours = batch.after[mask], model.read(guess[mask])
            loss = loss + _LOSS_DECAY**s * distribution_loss(ours, matrix, wanted, matrix)
            if weight:
                state_loss = torch.nn.functional.smooth_l1_loss(ours / scale, wanted / scale)
                loss = loss + _LOSS_DECAY**s * weight * state_loss
        optimizer.step(loss)
    ranks = _ranks(model, data, held_out[:_N_EVALUATED], matrix, tokens)
    return TrainedEagle(
        shape,
        {name: tensor.numpy() for name, tensor in tensors_of(model).items()},
        tokens,
        chain_accuracy(ranks),
        int((ranks[:, 0] >= 0).sum()),
    )


def _rms(states: npt.NDArray[np.float16]) -> float:
    """Root mean square."""
    return float(np.sqrt((states[:4096].astype(np.float32) ** 2).mean()))


def _ranks(
    model: Any,
    data: Sequences,
    sequences: Sequence[int],
    matrix: Any,
    tokens: npt.NDArray[np.int32] | None,
) -> Ints:
    """The rank of the correct token at each depth of a chain from every position, (n, N_DEPTHS)."""
    import torch

    found = []
    with torch.inference_mode():
        for sequence in sequences:
            batch = data.batch([sequence])
            mask = batch.mask[0].cpu().numpy()
            choices = batch.choices[0].cpu().numpy()
            ranks = np.full((len(mask), N_DEPTHS), -1, np.int64)
            for depth, guess in enumerate(model(batch.embeddings, batch.before, N_DEPTHS)):
                logits = (model.read(guess) @ matrix.T)[0]
                at = np.where(mask, ranks_of(logits, choices, tokens), -1)
                # Pass ``depth`` predicts each position from a chain begun ``depth`` earlier.
                ranks[: len(at) - depth, depth] = at[depth:]
            found.append(ranks[mask])
    return np.concatenate(found)
