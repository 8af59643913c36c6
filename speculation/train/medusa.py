"""Trains Medusa heads on collected states, in PyTorch.

From the hidden state at token t, head k learns the target's greedy choice after token t + 1 + k.
The labels are the target's choices, not the text's tokens, because verification compares with the
target. Each head's loss weighs 0.8 of the one before (Medusa, Cai et al. 2024, arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.tree import Floats
from speculation.heads.medusa import MedusaWeights
from speculation.heads.medusa_file import default_tree
from speculation.ranges import check_ranges
from speculation.train import TrainError
from speculation.train.loss import MAX_LOGITS
from speculation.train.ranks import N_RANKS, accuracy_of, replay
from speculation.train.schedule import ScheduledAdamW, held_out_start
from speculation.train.sequences import draft_vocab
from speculation.train.states import States

OUTPUTS = ("target", "one", "each")
_LOSS_DECAY = 0.8  # weight of a head's loss relative to the head before
_NO_LABEL = -100  # beyond the end of a span; cross_entropy's default ignore_index
_NOT_DRAFTED = -101  # a token outside the draft vocabulary

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MedusaTraining:
    """Parameters of Medusa training.

    heads     number of heads; each drafts one token further ahead
    blocks    residual blocks per head
    output    target = all heads use the target's output matrix; one = train one copy for all heads;
              each = train one copy per head
    vocab     draft vocabulary: the most frequent tokens in the data; 0 = all tokens
    epochs    passes over the data
    batch     states per step
    rate      peak learning rate
    held_out  share of the sequences held out for evaluation, from the end of the data
    nodes     draft tokens in the tree written to the file
    seed      random seed
    """

    heads: int = 4
    blocks: int = 2
    output: str = "target"
    vocab: int = 0
    epochs: float = 4.0
    batch: int = 256
    rate: float = 3e-3
    held_out: float = 0.05
    nodes: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("heads", 1, 8),
                ("blocks", 1, 8),
                ("vocab", 0, 2**31),
                ("epochs", 0.0, 1000.0),
                ("batch", 1, 2**20),
                ("rate", 0.0, 1.0),
                ("held_out", 0.001, 0.5),
                ("seed", 0, 2**32 - 1),
                ("nodes", 1, 255),
            ),
        )
        if self.output not in OUTPUTS:
            raise InvalidParameter(f"output is {self.output!r}; give one of {', '.join(OUTPUTS)}")


@dataclass(frozen=True)
class Trained:
    """Trained heads with their accuracy on held-out sequences.

    n_held_out       states it was measured on
    tokens_per_step  of a simulated decoding of the held-out sequences with the file's tree
    """

    weights: MedusaWeights
    n_held_out: int
    tokens_per_step: float


def train(
    states: States,
    output: Floats,
    params: MedusaTraining,
    device: str = "cpu",
    progress: Callable[[int, int, float], None] | None = None,
) -> Trained:
    """Train heads on ``states``; ``output`` is the target's output matrix, (n_vocab, n_embd).

    ``progress(step, n_steps, loss)`` is called after each step. Raises TrainError if there are too
    few sequences to hold one out, or no token to train on.
    """
    import torch

    torch.manual_seed(params.seed)
    first_held_out = held_out_start(states, params.held_out)
    labels = _labels(states, params.heads)
    tokens = draft_vocab(states, params.vocab, len(output))
    if tokens is not None:
        output = output[tokens]
        labels = _renumbered(labels, tokens)
    model = _Heads(params, np.array(output), torch).to(device)
    usable = np.flatnonzero((labels[:first_held_out] >= 0).any(axis=1))
    if len(usable) == 0:
        raise TrainError("the data has no token to train on; give longer texts")
    n_steps = max(1, round(params.epochs * len(usable) / params.batch))
    rng = np.random.default_rng(params.seed)
    optimizer = ScheduledAdamW(model.parameters(), params.rate, n_steps, progress)
    weights = torch.tensor([_LOSS_DECAY**head for head in range(params.heads)], device=device)
    order = rng.permutation(usable)
    at = 0
    for _ in range(n_steps):
        if at + params.batch > len(order):
            order, at = rng.permutation(usable), 0
        rows = np.sort(order[at : at + params.batch])
        at += params.batch
        logits = model(_states(states, rows, device, torch))
        wanted = torch.from_numpy(np.maximum(labels[rows], _NO_LABEL)).to(device)
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=_NO_LABEL, reduction="none"
        )
        n_labels = (wanted != _NO_LABEL).sum(dim=0).clamp(min=1)
        of_heads = losses.view(wanted.shape).sum(dim=0) / n_labels
        loss: Any = (of_heads * weights).sum() / weights.sum()
        optimizer.step(loss)
    ranks = _ranks(model, states, first_held_out, labels, device, torch)
    found = model.weights(tokens, accuracy_of(ranks), params.nodes)
    return Trained(found, int((ranks[:, 0] >= 0).sum()), replay(ranks, found.tree))


def _Heads(params: MedusaTraining, output: Floats, torch: Any) -> Any:  # noqa: N802 - makes a class
    """The heads as a module: states (n, n_embd) -> logits (n, n_heads, n_drafted)."""
    nn = torch.nn
    n_embd = output.shape[1]

    class Heads(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            shape = (params.blocks, params.heads, n_embd, n_embd)
            self.matrices = nn.Parameter(torch.zeros(shape))
            self.biases = nn.Parameter(torch.zeros(shape[:-1]))
            matrix = torch.from_numpy(output)
            if params.output == "each":
                matrix = matrix.repeat(params.heads, 1, 1)
            self.output = nn.Parameter(matrix.clone(), requires_grad=params.output != "target")

        def forward(self, hidden: Any) -> Any:
            state = hidden.expand(params.heads, -1, -1)  # (n_heads, n, n_embd)
            for matrix, bias in zip(self.matrices, self.biases, strict=True):
                state = state + nn.functional.silu(state @ matrix.mT + bias[:, None])
            return (state @ self.output.mT).transpose(0, 1)

        def weights(self, tokens: Any, accuracy: Floats, nodes: int) -> MedusaWeights:
            def array(parameter: Any) -> Floats:
                found: Floats = parameter.detach().cpu().float().numpy()
                return found

            return MedusaWeights(
                array(self.matrices),
                array(self.biases),
                array(self.output),
                params.output == "target",
                tokens,
                accuracy,
                default_tree(accuracy, nodes),
            )

    return Heads()


def _labels(states: States, n_heads: int) -> Ints:
    """The label of each head at each token, (n, n_heads).

    _NO_LABEL where the next token is not trained on, and from the last token of its span on: what
    the target would choose after the end of a reply does not matter.
    """
    n = len(states)
    span_end = np.append(states.span_end[1:], 0)
    at = np.arange(n)[:, None] + 1 + np.arange(n_heads)[None]
    found: Ints = np.asarray(states.choices).astype(np.int64)[np.minimum(at, n - 1)]
    found[at >= span_end[:, None] - 1] = _NO_LABEL
    return found


def _renumbered(labels: Ints, tokens: npt.NDArray[np.int32]) -> Ints:
    """Labels as indices into the draft vocabulary; _NOT_DRAFTED for tokens outside it."""
    at = np.searchsorted(tokens, labels).clip(max=len(tokens) - 1)
    return np.where(labels < 0, labels, np.where(tokens[at] == labels, at, _NOT_DRAFTED))


def _states(states: States, rows: Ints, device: str, torch: Any) -> Any:
    return torch.from_numpy(states.hidden[rows].astype(np.float32)).to(device)


def _ranks(model: Any, states: States, first: int, labels: Ints, device: str, torch: Any) -> Ints:
    """The rank of each head's label from token ``first`` on, (n, n_heads).

    N_RANKS stands for every lower rank and for _NOT_DRAFTED, -1 for no label.
    """
    found = []
    n = max(1, min(1024, MAX_LOGITS // (labels.shape[1] * model.output.shape[-2])))
    with torch.inference_mode():
        for start in range(first, len(states), n):
            rows = np.arange(start, min(start + n, len(states)))
            logits = model(_states(states, rows, device, torch))
            wanted = torch.from_numpy(labels[rows]).to(device)
            correct = logits.gather(2, wanted.clamp(min=0).unsqueeze(2))
            found.append((logits > correct).sum(dim=2).clamp(max=N_RANKS).cpu().numpy())
    ranks: Ints = np.concatenate(found)
    ranks[labels[first:] == _NOT_DRAFTED] = N_RANKS
    ranks[labels[first:] == _NO_LABEL] = -1
    return ranks
