"""Trains a ReDrafter head on collected states, in PyTorch.

From the hidden state at token t and the actual tokens that follow, the head learns the target's
distribution after tokens t + 1, t + 2, and so on: the knowledge distillation of ReDrafter (Cheng et
al. 2024, arXiv 2403.09919).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.tree import Floats
from speculation.heads.redrafter import ReDrafterWeights
from speculation.ranges import check_ranges
from speculation.train.loss import distribution_loss
from speculation.train.ranks import Ints, chain_accuracy, ranks_of
from speculation.train.schedule import ScheduledAdamW
from speculation.train.sequences import Batch, Sequences, batches, draft_vocab
from speculation.train.states import States

OUTPUTS = ("target", "one")
N_DEPTHS = 6  # length of the chains whose accuracy is measured
_LOSS_DECAY = 0.8  # weight of a token's loss relative to the token before
_N_EVALUATED = 256  # held-out sequences used for the evaluation


@dataclass(frozen=True)
class ReDrafterTraining:
    """Parameters of ReDrafter training.

    length    draft length the head is trained for
    blocks    residual blocks after the first
    output    target = use the target's output matrix; one = train a copy of it
    vocab     draft vocabulary: the most frequent tokens in the data; 0 = all tokens
    epochs    passes over the data
    batch     sequences per step
    rate      peak learning rate
    held_out  share of the sequences held out for evaluation, from the end of the data
    seed      random seed
    """

    length: int = 5
    blocks: int = 1
    output: str = "target"
    vocab: int = 0
    epochs: float = 8.0
    batch: int = 8
    rate: float = 3e-3
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("length", 1, 16),
                ("blocks", 0, 8),
                ("vocab", 0, 2**31),
                ("epochs", 0.0, 1000.0),
                ("batch", 1, 2**20),
                ("rate", 0.0, 1.0),
                ("held_out", 0.001, 0.5),
                ("seed", 0, 2**32 - 1),
            ),
        )
        if self.output not in OUTPUTS:
            raise InvalidParameter(f"output is {self.output!r}; give one of {', '.join(OUTPUTS)}")


@dataclass(frozen=True)
class TrainedReDrafter:
    """A trained head and its accuracy on held-out sequences.

    accuracy    of a chain, (N_DEPTHS, N_RANKS); see ``chain_accuracy``
    n_held_out  states it was measured on
    """

    weights: ReDrafterWeights
    accuracy: Floats
    n_held_out: int


def train_redrafter(
    states: States,
    embeddings: Floats,
    output: Floats,
    params: ReDrafterTraining,
    device: str = "cpu",
    progress: Callable[[int, int, float], None] | None = None,
) -> TrainedReDrafter:
    """Train a head on ``states``; ``embeddings`` and ``output`` are the target's matrices.

    Both are (n_vocab, n_embd). ``progress(step, n_steps, loss)`` is called after each step. Raises
    TrainError if there are too few sequences to hold one out, or no token to train on.
    """
    import torch

    torch.manual_seed(params.seed)
    data = Sequences(states, states.hidden, embeddings, device)
    train, held_out = data.split(params.held_out)
    tokens = draft_vocab(states, params.vocab, len(output))
    matrix = torch.from_numpy(np.array(output if tokens is None else output[tokens])).to(device)
    size = float(np.sqrt((embeddings.astype(np.float32) ** 2).mean()))
    model = _Head(params, matrix, size, torch).to(device)
    n_steps = max(1, math.ceil(params.epochs * len(train) / params.batch))
    optimizer = ScheduledAdamW(model.parameters(), params.rate, n_steps, progress)
    lengths = np.diff(states.ends, prepend=0).tolist()
    for sequences in batches(train, lengths, params.batch, n_steps, params.seed):
        batch = data.batch(sequences)
        wanted = batch.after[batch.mask]
        loss: Any = 0.0
        for i, (places, ours) in enumerate(model.chains(batch, params.length)):
            found = distribution_loss(ours, model.output, wanted[places], matrix)
            loss = loss + _LOSS_DECAY**i * found
        optimizer.step(loss)
    ranks = _ranks(model, data, held_out[:_N_EVALUATED], tokens, torch)
    n_held_out = int((ranks[:, 0] >= 0).sum())
    return TrainedReDrafter(model.weights(tokens), chain_accuracy(ranks), n_held_out)


def _Head(  # noqa: N802 - makes a class
    params: ReDrafterTraining, output: Any, size: float, torch: Any
) -> Any:
    """The head as a module; ``size`` is the root mean square of the embeddings."""
    nn = torch.nn
    n_embd = output.shape[1]

    class Head(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Linear(n_embd, n_embd)  # its bias serves the recurrence too
            self.recurrent = nn.Linear(n_embd, n_embd, bias=False)
            self.mixing = nn.Linear(2 * n_embd, n_embd)
            self.blocks = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(params.blocks))
            for linear in (self.token, self.recurrent, self.mixing, *self.blocks):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.normal_(self.token.weight, std=n_embd**-0.5 / size)
            self.projection = nn.Linear(n_embd, n_embd, bias=False)
            nn.init.zeros_(self.projection.weight)  # initially the head adds nothing
            self.output = nn.Parameter(output.clone(), requires_grad=params.output != "target")

        def chains(self, batch: Batch, length: int) -> Any:
            """Run a chain from every position in the mask; yield, for each token of the chains, its
            positions (indices among those in the mask) and the input of the output matrix,
            (n, n_embd).

            A chain ends before the first position outside the mask.
            """
            where = batch.mask.flatten().nonzero().squeeze(1)
            row = torch.full((batch.mask.numel(),), -1, device=where.device)
            row[where] = torch.arange(len(where), device=where.device)
            time = batch.mask.shape[1]
            hidden = batch.before.flatten(0, 1)[where]
            inner = self.token(batch.embeddings.flatten(0, 1)[where])
            of_hidden = hidden @ self.mixing.weight[:, n_embd:].T + self.mixing.bias
            places = torch.arange(len(where), device=where.device)
            state = None
            for _ in range(length):
                now = inner[places]
                state = nn.functional.silu(now if state is None else now + self.recurrent(state))
                mixed = state @ self.mixing.weight[:, :n_embd].T + of_hidden
                u = nn.functional.silu(mixed)
                for block in self.blocks:
                    u = u + nn.functional.silu(block(u))
                yield places, hidden + self.projection(u)
                last = (where[places] + 1) % time == 0
                further = torch.where(last, -1, row[(where[places] + 1).clamp(max=len(row) - 1)])
                on = further >= 0
                places, state = further[on], state[on]
                hidden, of_hidden = hidden[on], of_hidden[on]
                if not len(places):
                    return

        def weights(self, tokens: npt.NDArray[np.int32] | None) -> ReDrafterWeights:
            def array(parameter: Any) -> Floats:
                found: Floats = parameter.detach().cpu().float().numpy()
                return found

            def stacked(parts: list[Floats], *shape: int) -> Floats:
                return np.stack(parts) if parts else np.empty((0, *shape), np.float32)

            return ReDrafterWeights(
                token=array(self.token.weight),
                recurrent=array(self.recurrent.weight),
                bias=array(self.token.bias),
                mixing=array(self.mixing.weight),
                mixing_bias=array(self.mixing.bias),
                blocks=stacked([array(block.weight) for block in self.blocks], n_embd, n_embd),
                block_biases=stacked([array(block.bias) for block in self.blocks], n_embd),
                projection=array(self.projection.weight),
                output=array(self.output),
                shares_target=params.output == "target",
                tokens=tokens,
            )

    return Head()


def _ranks(
    model: Any,
    data: Sequences,
    sequences: list[int],
    tokens: npt.NDArray[np.int32] | None,
    torch: Any,
) -> Ints:
    """The rank of the correct token at each depth of a chain from every position, (n, N_DEPTHS)."""
    found = []
    with torch.inference_mode():
        for sequence in sequences:
            batch = data.batch([sequence])
            choices = batch.choices[batch.mask].cpu().numpy()
            ranks = np.full((len(choices), N_DEPTHS), -1, np.int64)
            for depth, (places, ours) in enumerate(model.chains(batch, N_DEPTHS)):
                at = places.cpu().numpy()
                ranks[at - depth, depth] = ranks_of(ours @ model.output.T, choices[at], tokens)
            found.append(ranks)
    return np.concatenate(found)
