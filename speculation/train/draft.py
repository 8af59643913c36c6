"""Trains a small draft model for a target on collected states, in PyTorch.

The draft model is a Llama of a few narrow layers with the target's tokenizer. It learns the
target's distribution after every token of the target's own text (distillation, as in DistillSpec,
Zhou et al. 2023, arXiv 2310.08461), computed from the collected states.

In a small model most of the work is the output matrix of a large vocabulary. So only the rows of
the tokens that the target chooses most often are trained. The other rows are 0 and give the logit
0, which the loss counts: what the model says of a token's probability is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.gguf.writer import FILE_TYPES, QUANTIZATION_VERSION, Value, write_gguf
from batching.tree import Floats
from speculation.heads.eagle import EagleShape
from speculation.heads.file import copied_tokenizer, new_tensor
from speculation.ranges import check_ranges
from speculation.train import TrainError
from speculation.train.eagle import KINDS, N_DEPTHS
from speculation.train.loss import distribution_loss
from speculation.train.ranks import Ints, chain_accuracy, ranks_of
from speculation.train.schedule import ScheduledAdamW, held_out_start
from speculation.train.sequences import batches, draft_vocab
from speculation.train.states import States

_HEAD_SIZE = 64
_N_EVALUATED = 64  # held-out sequences used for the evaluation


@dataclass(frozen=True)
class DraftTraining:
    """Parameters of draft model training.

    width     width of the model, a multiple of 64
    layers    number of layers
    ff        width of the feed-forward blocks, a multiple of 32; 0 = 3 times the width
    vocab     draft vocabulary: the most frequent tokens in the data; 0 = all tokens
    epochs    passes over the data
    batch     sequences per step
    rate      peak learning rate
    held_out  share of the sequences held out for evaluation, from the end of the data
    kind      tensor type of the matrices: f32, f16 or q8_0
    seed      random seed
    """

    width: int = 192
    layers: int = 4
    ff: int = 0
    vocab: int = 8192
    epochs: float = 8.0
    batch: int = 8
    rate: float = 2e-3
    held_out: float = 0.05
    kind: str = "q8_0"
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("width", _HEAD_SIZE, 2**16),
                ("layers", 1, 64),
                ("ff", 0, 2**20),
                ("vocab", 0, 2**31),
                ("epochs", 0.0, 1000.0),
                ("batch", 1, 2**20),
                ("rate", 0.0, 1.0),
                ("held_out", 0.001, 0.5),
                ("seed", 0, 2**32 - 1),
            ),
        )
        for name, size in (("width", _HEAD_SIZE), ("ff", 32)):
            if getattr(self, name) % size:
                raise InvalidParameter(
                    f"{name} is {getattr(self, name)}; give a multiple of {size}"
                )
        if self.kind not in KINDS:
            raise InvalidParameter(f"kind is {self.kind!r}; give one of {', '.join(KINDS)}")

    @property
    def shape(self) -> EagleShape:
        """The shape of each layer."""
        n_head = self.width // _HEAD_SIZE
        return EagleShape(self.width, n_head, n_head, self.ff or 3 * self.width)


@dataclass(frozen=True)
class TrainedDraft:
    """A trained draft model and its accuracy on held-out sequences.

    tensors     by llama.cpp's names
    accuracy    of a chain, (N_DEPTHS, N_RANKS); see ``chain_accuracy``
    n_held_out  tokens it was measured on
    """

    tensors: dict[str, Floats]
    accuracy: Floats
    n_held_out: int


@dataclass(frozen=True)
class _Batch:
    """Sequences, padded at their ends.

    tokens   (sequences, time)
    after    the target's states at the tokens, (sequences, time, n_embd)
    choices  its greedy choice after each token, (sequences, time)
    mask     tokens followed by one to train on, (sequences, time)
    """

    tokens: Any
    after: Any
    choices: npt.NDArray[np.int32]
    mask: Any


def train_draft(
    states: States,
    embeddings: Floats,
    output: Floats,
    params: DraftTraining,
    device: str = "cpu",
    progress: Callable[[int, int, float], None] | None = None,
) -> TrainedDraft:
    """Train a draft model; ``embeddings`` and ``output`` are the target's, (n_vocab, n_embd).

    The model's own embeddings begin as the principal components of the target's.
    ``progress(step, n_steps, loss)`` is called after each step. Raises TrainError if there are too
    few sequences to hold one out, or no token to train on.
    """
    import torch

    from speculation.train.layer import DraftModule

    torch.manual_seed(params.seed)
    first = held_out_start(states, params.held_out)
    sequences = [i for i in range(len(states.ends)) if _mask(states, i).any()]
    train = [i for i in sequences if states.ends[i] <= first]
    if not train:
        raise TrainError("the data has no token to train on; give longer texts")
    tokens = draft_vocab(states, params.vocab, len(output))
    own = _principal(embeddings, params.width)
    model: Any = DraftModule(params.shape, params.layers, torch.from_numpy(own), tokens).to(device)
    matrix = torch.from_numpy(np.array(output if tokens is None else output[tokens])).to(device)
    n_zero = 0 if tokens is None else len(output) - len(tokens)
    n_steps = max(1, math.ceil(params.epochs * len(train) / params.batch))
    optimizer = ScheduledAdamW(model.parameters(), params.rate, n_steps, progress)
    lengths = np.diff(states.ends, prepend=0).tolist()
    for chosen in batches(train, lengths, params.batch, n_steps, params.seed):
        batch = _batch(states, chosen, device)
        ours = model(batch.tokens)[batch.mask]
        wanted = batch.after[batch.mask]
        optimizer.step(distribution_loss(ours, model.output.weight, wanted, matrix, n_zero))
    ranks = _ranks(model, states, sequences[len(train) :][:_N_EVALUATED], tokens, device)
    tensors = {name: tensor.numpy() for name, tensor in model.tensors(len(output)).items()}
    return TrainedDraft(tensors, chain_accuracy(ranks), int((ranks[:, 0] >= 0).sum()))


def write_draft(
    path: Path, name: str, params: DraftTraining, trained: TrainedDraft, target: Path, n_ctx: int
) -> None:
    """Write a draft model with the tokenizer of the GGUF ``target``, for texts of ``n_ctx`` tokens.

    The file is written to a temporary name and renamed. Raises DiskFull.
    """
    shape = params.shape
    sizes: dict[str, Value] = {
        "context_length": n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": params.layers,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "rope.dimension_count": shape.n_embd // shape.n_head,
        "rope.freq_base": float(shape.rope_base),
        "vocab_size": len(trained.tensors["token_embd.weight"]),
    }
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": f"Draft model for {name}",
        "general.file_type": FILE_TYPES[params.kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        **{f"llama.{key}": value for key, value in sizes.items()},
        **copied_tokenizer(target),
    }
    tensors = {name: new_tensor(of, params.kind) for name, of in trained.tensors.items()}
    write_gguf(path, metadata, tensors)


def _principal(embeddings: Floats, width: int) -> Floats:
    """The principal components of ``embeddings``, (n_vocab, width), of root mean square 1 / √width.

    A model wider than the target gets zeros beyond them.
    """
    values, vectors = np.linalg.eigh(embeddings.T @ embeddings)
    order = np.argsort(-values)[:width]
    found = np.zeros((len(embeddings), width), np.float32)
    found[:, : len(order)] = embeddings @ vectors[:, order]
    return found / (np.sqrt((found**2).mean()) * math.sqrt(width)).astype(np.float32)  # type: ignore[no-any-return]


def _mask(states: States, sequence: int) -> npt.NDArray[np.bool_]:
    """The tokens of a sequence that are followed by one to train on, (time,)."""
    start, end = _bounds(states, sequence)
    found: npt.NDArray[np.bool_] = np.append(states.span_end[start + 1 : end] > 0, False)
    return found


def _bounds(states: States, sequence: int) -> tuple[int, int]:
    return int(states.ends[sequence - 1]) if sequence else 0, int(states.ends[sequence])


def _batch(states: States, sequences: Sequence[int], device: str) -> _Batch:
    import torch

    bounds = [_bounds(states, sequence) for sequence in sequences]
    shape = len(sequences), max(end - start for start, end in bounds)
    tokens, choices = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    after = np.zeros((*shape, states.hidden.shape[1]), np.float32)
    mask = np.zeros(shape, bool)
    for i, (sequence, (start, end)) in enumerate(zip(sequences, bounds, strict=True)):
        n = end - start
        tokens[i, :n] = states.tokens[start:end]
        choices[i, :n] = states.choices[start:end]
        after[i, :n] = states.hidden[start:end]
        mask[i, :n] = _mask(states, sequence)
    on_device = [torch.from_numpy(array).to(device) for array in (tokens, after, mask)]
    return _Batch(on_device[0], on_device[1], choices, on_device[2])


def _ranks(
    model: Any,
    states: States,
    sequences: Sequence[int],
    tokens: npt.NDArray[np.int32] | None,
    device: str,
) -> Ints:
    """The rank of the correct token at each depth of a chain from every token, (n, N_DEPTHS)."""
    import torch

    found = []
    with torch.inference_mode():
        for sequence in sequences:
            batch = _batch(states, [sequence], device)
            mask = batch.mask[0].cpu().numpy()
            logits = model.output(model(batch.tokens)[0])
            one = np.where(mask, ranks_of(logits, batch.choices[0], tokens), -1)
            # In its own text the target's choices are the tokens that follow, so after correct
            # drafts the model has read just this.
            ranks = np.full((len(one), N_DEPTHS), -1, np.int64)
            for depth in range(min(N_DEPTHS, len(one))):
                ranks[: len(one) - depth, depth] = one[depth:]
            found.append(ranks[mask])
    return np.concatenate(found)
