"""ReDrafter's head: a small recurrent network that drafts from one of the target's hidden states.

Cheng et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large Language Models", arXiv
2403.09919. The text's last token t_0 was chosen from the target's state h. Each token t_i advances
the network's own state s; both states together predict the next token:

    s_0 = SiLU(W e(t_0) + b)            s_i = SiLU(W e(t_i) + U s_(i-1) + b)
    u = SiLU(A s_i + B h + c)           u = u + SiLU(D u + d), for every further block
    logits_i = O (h + P u)

e is the target's embedding. O is the target's output matrix, which is not stored in the file; it
may be cut to a draft vocabulary. In the paper, the blocks are as wide as both
states together, and a trained O takes their result. Here they are as wide as h, and P maps their
result to the input of the target's O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.llama.model import Model
from batching.llama.weights import Weights
from batching.tree import Floats
from speculation.heads.base import Head, silu
from speculation.heads.file import HeadsFile, HeadsInfo, own_format, write_heads

Embeddings = Callable[[Sequence[int]], Floats]  # tokens -> embeddings, (n, n_embd)


@dataclass(frozen=True)
class ReDrafterWeights:
    """The head's parameters.

    token      W, (n_embd, n_embd)
    recurrent  U, (n_embd, n_embd)
    bias       b, (n_embd,)
    mixing     [A B], (n_embd, 2 n_embd)
    mixing_bias  c, (n_embd,)
    blocks     D of each further block, (n_blocks, n_embd, n_embd)
    block_biases  d of each further block, (n_blocks, n_embd)
    projection P, (n_embd, n_embd)
    output     O, (n_drafted, n_embd)
    tokens     the draft vocabulary, a token per row of O, (n_drafted,); None = all tokens
    """

    token: Floats
    recurrent: Floats
    bias: Floats
    mixing: Floats
    mixing_bias: Floats
    blocks: Floats
    block_biases: Floats
    projection: Floats
    output: Floats
    tokens: npt.NDArray[np.int32] | None


class Beams(NamedTuple):
    """The beams of one text, n of them, to be continued.

    hidden  the target's state from which the text's last token was chosen, (n_embd,)
    tokens  the last token of each beam: at first that of the text alone
    states  the head's state before it, (n, n_embd), from the level above; None at first
    """

    hidden: Floats
    tokens: Sequence[int]
    states: Any


class Level(NamedTuple):
    """The beams after their last tokens.

    values  logits of the next, (n, n_drafted)
    states  the head's states, (n, n_embd)
    hidden  as in ``Beams``
    """

    values: Floats
    states: Any
    hidden: Floats

    def logits(self, row: int) -> Floats:
        logits: Floats = self.values[row]
        return logits

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> Beams:
        """The beams that continue the rows ``parents`` by ``tokens``."""
        return Beams(self.hidden, tokens, self.states[list(parents)])


class ReDrafterHead(Head):
    """The head, in NumPy.

    tokens  the draft vocabulary, as in its weights
    """

    def __init__(self, weights: ReDrafterWeights, embeddings: Embeddings) -> None:
        """``embeddings`` returns the target's embeddings."""
        self.tokens = weights.tokens
        self._weights, self._embeddings = weights, embeddings
        n_embd = len(weights.bias)
        self._state_matrix = np.ascontiguousarray(weights.mixing[:, :n_embd])
        self._hidden_matrix = np.ascontiguousarray(weights.mixing[:, n_embd:])

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        """The next level of each part."""
        w = self._weights
        sizes = [len(part.tokens) for part in parts]
        rows = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        part_of = np.repeat(np.arange(len(parts)), sizes)  # of each row
        hidden = np.stack([part.hidden for part in parts])
        # B h + c is the same for all rows of a text.
        offset = (hidden @ self._hidden_matrix.T + w.mixing_bias)[part_of]
        embeddings = self._embeddings([token for part in parts for token in part.tokens])
        inner = embeddings @ w.token.T + w.bias
        for part, own in zip(parts, rows, strict=True):
            if part.states is not None:
                inner[own] += part.states @ w.recurrent.T
        states = silu(inner)
        u = silu(states @ self._state_matrix.T + offset)
        for matrix, bias in zip(w.blocks, w.block_biases, strict=True):
            u = u + silu(u @ matrix.T + bias)
        z = hidden[part_of] + u @ w.projection.T
        # OpenBLAS is over twice as fast with the large matrix on the left, see ``heads.medusa``.
        values = (w.output @ z.T).T
        return [
            Level(values[own], states[own], part.hidden)
            for part, own in zip(parts, rows, strict=True)
        ]


def load_redrafter(file: HeadsFile, model: Model) -> ReDrafterHead:
    """Load the head for ``model``, after ``HeadsFile.check_target``.

    Raises HeadsError if the file's tensors contradict its metadata, OutOfMemory if there is no room
    for the target's output matrix, UnsupportedModel if the target's file lacks a matrix.
    """
    embeddings = partial(Weights(model.path).rows, "token_embd.weight")
    return ReDrafterHead(read_weights(file, model.path), embeddings)


KIND = own_format("redrafter", load_redrafter)


def read_weights(file: HeadsFile, target: Path) -> ReDrafterWeights:
    """Read the parameters; ``target`` is the target's GGUF, which has the output matrix."""
    n = file.info.n_embd
    n_blocks = file.value("redrafter.block_count", int)
    blocks = np.empty((n_blocks, n, n), np.float32)
    block_biases = np.empty((n_blocks, n), np.float32)
    for block in range(n_blocks):
        blocks[block] = file.tensor(f"block.{block}.weight", n, n)
        block_biases[block] = file.tensor(f"block.{block}.bias", n)
    return ReDrafterWeights(
        token=file.tensor("token.weight", n, n),
        recurrent=file.tensor("recurrent.weight", n, n),
        bias=file.tensor("recurrent.bias", n),
        mixing=file.tensor("mixing.weight", n, 2 * n),
        mixing_bias=file.tensor("mixing.bias", n),
        blocks=blocks,
        block_biases=block_biases,
        projection=file.tensor("projection.weight", n, n),
        output=file.output_matrix(target),
        tokens=file.tokens(),
    )


def write_redrafter(path: Path, info: HeadsInfo, weights: ReDrafterWeights) -> None:
    """Write a head to a GGUF, matrices as F16."""
    metadata = {
        "redrafter.block_count": len(weights.blocks),
        "redrafter.shares_target_output": True,
    }
    tensors: dict[str, npt.NDArray[Any]] = {
        "token.weight": weights.token,
        "recurrent.weight": weights.recurrent,
        "recurrent.bias": weights.bias,
        "mixing.weight": weights.mixing,
        "mixing.bias": weights.mixing_bias,
        "projection.weight": weights.projection,
    }
    for block, (matrix, bias) in enumerate(zip(weights.blocks, weights.block_biases, strict=True)):
        tensors[f"block.{block}.weight"] = matrix
        tensors[f"block.{block}.bias"] = bias
    write_heads(path, info, metadata, tensors, tokens=weights.tokens)
