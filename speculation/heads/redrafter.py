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
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batching.llama.model import Model
from batching.llama.weights import Weights
from batching.tree import Floats
from speculation.heads.base import Head, silu
from speculation.heads.file import HeadsFile, HeadsInfo, HeadsWeights, own_format, write_heads

Embeddings = Callable[[Sequence[int]], Floats]  # tokens -> embeddings, (n, n_embd)


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

    def __init__(self, weights: HeadsWeights, embeddings: Embeddings) -> None:
        """``embeddings`` returns the target's embeddings."""
        self.tokens, self._output = weights.tokens, weights.output
        self._weights, self._embeddings = weights.tensors, embeddings
        w = weights.tensors
        n_embd = len(w["recurrent.bias"])
        self._state_matrix = np.ascontiguousarray(w["mixing.weight"][:, :n_embd])
        self._hidden_matrix = np.ascontiguousarray(w["mixing.weight"][:, n_embd:])

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        """The next level of each part."""
        w = self._weights
        sizes = [len(part.tokens) for part in parts]
        rows = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        part_of = np.repeat(np.arange(len(parts)), sizes)  # of each row
        hidden = np.stack([part.hidden for part in parts])
        # B h + c is the same for all rows of a text.
        offset = (hidden @ self._hidden_matrix.T + w["mixing.bias"])[part_of]
        embeddings = self._embeddings([token for part in parts for token in part.tokens])
        inner = embeddings @ w["token.weight"].T + w["recurrent.bias"]
        for part, own in zip(parts, rows, strict=True):
            if part.states is not None:
                inner[own] += part.states @ w["recurrent.weight"].T
        states = silu(inner)
        u = silu(states @ self._state_matrix.T + offset)
        for i in range(sum(name.startswith("block.") for name in w) // 2):
            u = u + silu(u @ w[f"block.{i}.weight"].T + w[f"block.{i}.bias"])
        z = hidden[part_of] + u @ w["projection.weight"].T
        # OpenBLAS is over twice as fast with the large matrix on the left, see ``heads.medusa``.
        values = (self._output @ z.T).T
        return [
            Level(values[own], states[own], part.hidden)
            for part, own in zip(parts, rows, strict=True)
        ]


def shapes(n_embd: int, n_blocks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by their names in the file: W, U, b, [A B], c, P, then D and d."""
    n = n_embd
    found: dict[str, tuple[int, ...]] = {
        "token.weight": (n, n),
        "recurrent.weight": (n, n),
        "recurrent.bias": (n,),
        "mixing.weight": (n, 2 * n),
        "mixing.bias": (n,),
        "projection.weight": (n, n),
    }
    for i in range(n_blocks):
        found |= {f"block.{i}.weight": (n, n), f"block.{i}.bias": (n,)}
    return found


def load_redrafter(file: HeadsFile, model: Model) -> ReDrafterHead:
    """Load the head for ``model``, after ``HeadsFile.check_target``.

    Raises as ``HeadsFile.weights``, and UnsupportedModel if the target's file lacks a matrix.
    """
    names = shapes(file.info.n_embd, file.value("redrafter.block_count", int))
    embeddings = partial(Weights(model.path).rows, "token_embd.weight")
    return ReDrafterHead(file.weights(names, model.path), embeddings)


KIND = own_format("redrafter", load_redrafter)


def write_redrafter(path: Path, info: HeadsInfo, weights: HeadsWeights) -> None:
    """Write a head to a GGUF, matrices as F16."""
    n_blocks = sum(name.startswith("block.") for name in weights.tensors) // 2
    metadata = {"redrafter.block_count": n_blocks}
    write_heads(path, info, metadata, weights.tensors, tokens=weights.tokens)
