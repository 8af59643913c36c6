"""EAGLE's heads learnt from collected states, in PyTorch.

From a token and the state before it the head learns the state after it, and what the target would
say there: smooth L1 on the states, and cross-entropy with the target's own distribution, as in
EAGLE (Li et al. 2024, arXiv 2401.15077), where the states read are noisy so that a guess will do
for them. EAGLE-3's head (Li et al. 2025, arXiv 2503.01840) reads what went into three layers
instead, and learns from the distribution alone. ``layer`` says how both learn to go on from their
guesses.
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
from speculation.train.schedule import Descent
from speculation.train.sequences import Sequences, batches, drafted
from speculation.train.states import States

KINDS = ("f32", "f16", "q8_0")
N_DEPTHS = 6  # tokens in a row whose accuracy is measured
_FURTHER = 0.8  # weight of a pass, of that of the pass before
_N_JUDGED = 64  # held-out pieces that are gone through in a measurement


@dataclass(frozen=True)
class EagleTraining:
    """What is trained, and how.

    ff        width of the layer's feed-forward block; 0 = the target's
    vocab     tokens that are drafted: the most frequent in the data; 0 = all
    passes    how often a text is gone through, the head's guesses taking the place of states
    states    weight of the loss on states, beside that on the target's distribution; EAGLE-3 has
              none
    noise     what is added to the states read, uniform, as a share of their size
    epochs    times that the texts are gone through
    batch     texts of a step
    rate      learning rate at its highest
    held_out  share of the pieces, the last ones, that the head is judged by
    kind      type of the matrices in the file: f32, f16 or q8_0
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
    """A head, and how often each choice of a chain's tokens holds if those before it did.

    tensors   by the names that the file has for them
    tokens    what it drafts, (n_drafted,); None = everything
    accuracy  (N_DEPTHS, N_RANKS), on what was held out
    """

    shape: EagleShape
    tensors: dict[str, Floats]
    tokens: npt.NDArray[np.int32] | None
    accuracy: Floats
    n_held_out: int


def shape_for(model: Model, ff: int = 0) -> EagleShape:
    """A layer like the target's own, as far as its heads divide its width."""
    architecture = model.metadata("general.architecture")

    def of(key: str, default: float) -> float:
        value = model.metadata(f"{architecture}.{key}")
        try:
            return float(value) if value is not None else default
        except ValueError:  # a list, one value a layer
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
    """The layers that EAGLE-3's authors, and llama.cpp's converter, take; a small model has less.

    The third, half of all, and the last but two.
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

    Both are (n_vocab, n_embd). ``output_norm``, the weight of the target's last norm, (n_embd,),
    makes it a head for EAGLE-3, which takes states with ``layers``.

    ``progress(step, n_steps, loss)`` is called after each step. Raises TrainError when the states
    are too few to hold some out, or none is to be learnt from.
    """
    import torch

    from speculation.train.layer import Eagle3Module, EagleModule, tensors_of

    torch.manual_seed(params.seed)
    read = states.hidden if output_norm is None else states.layers
    if read is None:
        raise TrainError("the states were collected without the inputs of layers; collect anew")
    data = Sequences(states, read, embeddings, device)
    learnt, judged = data.split(params.held_out)
    tokens = drafted(states, params.vocab, len(output))
    matrix = torch.from_numpy(np.array(output if tokens is None else output[tokens])).to(device)
    scale = _size(states.hidden)
    sizes = np.sqrt((read[:4096].astype(np.float32) ** 2).mean(axis=0)) + 1e-6
    # Of each component, since those of layers' inputs differ by orders of magnitude.
    noise = torch.from_numpy(params.noise * sizes).to(device)
    model: Any
    if output_norm is None:
        model = EagleModule(shape, scale).to(device)
    else:
        norm = torch.from_numpy(output_norm)
        model = Eagle3Module(shape, norm, torch.from_numpy(sizes)).to(device)
    weight = params.states if output_norm is None else 0.0
    n_steps = max(1, math.ceil(params.epochs * len(learnt) / params.batch))
    descent = Descent(model.parameters(), params.rate, n_steps, progress)
    lengths = np.diff(states.ends, prepend=0).tolist()
    for pieces in batches(learnt, lengths, params.batch, n_steps, params.seed):
        batch = data.batch(pieces)
        before = batch.before + noise * (torch.rand_like(batch.before) * 2 - 1)
        guesses = model(batch.embeddings, before, params.passes)
        loss: Any = 0.0
        for s, guess in enumerate(guesses):
            some = batch.learnt.clone()
            some[:, :s] = False
            wanted, ours = batch.after[some], model.read(guess[some])
            loss = loss + _FURTHER**s * distribution_loss(ours, matrix, wanted, matrix)
            if weight:
                close = torch.nn.functional.smooth_l1_loss(ours / scale, wanted / scale)
                loss = loss + _FURTHER**s * weight * close
        descent.step(loss)
    ranks = _ranks(model, data, judged[:_N_JUDGED], matrix, tokens)
    return TrainedEagle(
        shape,
        {name: tensor.numpy() for name, tensor in tensors_of(model).items()},
        tokens,
        chain_accuracy(ranks),
        int((ranks[:, 0] >= 0).sum()),
    )


def _size(states: npt.NDArray[np.float16]) -> float:
    """Root mean square."""
    return float(np.sqrt((states[:4096].astype(np.float32) ** 2).mean()))


def _ranks(
    model: Any,
    data: Sequences,
    pieces: Sequence[int],
    matrix: Any,
    tokens: npt.NDArray[np.int32] | None,
) -> Ints:
    """Of chains begun at every place: the rank of what each token should be, (n, N_DEPTHS)."""
    import torch

    found = []
    with torch.inference_mode():
        for piece in pieces:
            batch = data.batch([piece])
            learnt = batch.learnt[0].cpu().numpy()
            choices = batch.choices[0].cpu().numpy()
            ranks = np.full((len(learnt), N_DEPTHS), -1, np.int64)
            for depth, guess in enumerate(model(batch.embeddings, batch.before, N_DEPTHS)):
                logits = (model.read(guess) @ matrix.T)[0]
                at = np.where(learnt, ranks_of(logits, choices, tokens), -1)
                # What pass ``depth`` says of a place is from a chain begun so many places before.
                ranks[: len(at) - depth, depth] = at[depth:]
            found.append(ranks[learnt])
    return np.concatenate(found)
