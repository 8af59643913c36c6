"""Medusa heads learnt from collected states, in PyTorch.

Head k learns, from the state at token t, what the target would say after token t + 1 + k: its own
choice there, not the text's token, since that is what verification will ask for. The losses of
further heads count less, by 0.8 a head, as in Medusa (Cai et al. 2024, arXiv 2401.10774).
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
from speculation.train.loss import MOST_LOGITS
from speculation.train.ranks import N_RANKS, accuracy_of, replayed
from speculation.train.schedule import Descent, held_out_from
from speculation.train.sequences import drafted
from speculation.train.states import States

OUTPUTS = ("target", "one", "each")
_FURTHER = 0.8  # weight of a head's loss, of that of the head before
_NO_LABEL = -100  # beyond the end of a text; cross_entropy's own mark
_NOT_DRAFTED = -101  # a token that no head can say

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MedusaTraining:
    """What is trained, and how.

    heads     tokens guessed beyond the next one
    blocks    residual blocks of a head
    output    target shares its output matrix with all heads, one trains a copy of it for all,
              each trains a copy for each head
    vocab     tokens that are drafted: the most frequent in the data; 0 = all
    epochs    times that the states are gone through
    batch     states of a step
    rate      learning rate at its highest
    held_out  share of the pieces, the last ones, that heads are judged by and do not learn from
    nodes     draft tokens of the tree written into the file
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
    """Heads with the accuracies that were measured on what was held out.

    n_held_out  states they were measured on
    tokens_per_step  of decoding what was held out with the tree in the file
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

    ``progress(step, n_steps, loss)`` is called after each step. Raises TrainError when the states
    are too few to hold some out.
    """
    import torch

    torch.manual_seed(params.seed)
    first_held_out = held_out_from(states, params.held_out)
    labels = _labels(states, params.heads)
    tokens = drafted(states, params.vocab, len(output))
    if tokens is not None:
        output = output[tokens]
        labels = _renumbered(labels, tokens)
    model = _Heads(params, np.array(output), torch).to(device)
    learnt = np.flatnonzero((labels[:first_held_out] >= 0).any(axis=1))
    if len(learnt) == 0:
        raise TrainError("no token of the data can be learnt from; give longer texts")
    n_steps = max(1, round(params.epochs * len(learnt) / params.batch))
    rng = np.random.default_rng(params.seed)
    descent = Descent(model.parameters(), params.rate, n_steps, progress)
    weights = torch.tensor([_FURTHER**head for head in range(params.heads)], device=device)
    order = rng.permutation(learnt)
    at = 0
    for _ in range(n_steps):
        if at + params.batch > len(order):
            order, at = rng.permutation(learnt), 0
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
        descent.step(loss)
    ranks = _ranks(model, states, first_held_out, labels, device, torch)
    found = model.weights(tokens, accuracy_of(ranks), params.nodes)
    return Trained(found, int((ranks[:, 0] >= 0).sum()), replayed(ranks, found.tree))


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
    """What each head is to say at each token, (n, n_heads); _NO_LABEL where that is not known.

    That is so where the next token is not to be learnt from, and beyond the end of its part. What
    the target would say after a part's last token, the end of a reply, is nobody's business.
    """
    n = len(states)
    until = np.append(states.until[1:], 0)
    at = np.arange(n)[:, None] + 1 + np.arange(n_heads)[None]
    found: Ints = np.asarray(states.choices).astype(np.int64)[np.minimum(at, n - 1)]
    found[at >= until[:, None] - 1] = _NO_LABEL
    return found


def _renumbered(labels: Ints, tokens: npt.NDArray[np.int32]) -> Ints:
    """Labels as rows of the cut output matrix; _NOT_DRAFTED where the token is not in it."""
    at = np.searchsorted(tokens, labels).clip(max=len(tokens) - 1)
    return np.where(labels < 0, labels, np.where(tokens[at] == labels, at, _NOT_DRAFTED))


def _states(states: States, rows: Ints, device: str, torch: Any) -> Any:
    return torch.from_numpy(states.hidden[rows].astype(np.float32)).to(device)


def _ranks(model: Any, states: States, first: int, labels: Ints, device: str, torch: Any) -> Ints:
    """The rank of what each head is to say, from token ``first`` on, (n, n_heads).

    N_RANKS stands for all from there on and for tokens that are not drafted; -1 for no label.
    """
    found = []
    n = max(1, min(1024, MOST_LOGITS // (labels.shape[1] * model.output.shape[-2])))
    with torch.inference_mode():
        for start in range(first, len(states), n):
            rows = np.arange(start, min(start + n, len(states)))
            logits = model(_states(states, rows, device, torch))
            wanted = torch.from_numpy(labels[rows]).to(device)
            right = logits.gather(2, wanted.clamp(min=0).unsqueeze(2))
            found.append((logits > right).sum(dim=2).clamp(max=N_RANKS).cpu().numpy())
    ranks: Ints = np.concatenate(found)
    ranks[labels[first:] == _NOT_DRAFTED] = N_RANKS
    ranks[labels[first:] == _NO_LABEL] = -1
    return ranks
