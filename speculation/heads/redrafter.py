"""ReDrafter's head: a small recurrent network that drafts from one of the target's hidden states.

Cheng et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large Language Models", arXiv
2403.09919. The text's last token t_0 was chosen from the target's state h. Each token t_i advances
the network's own state s; both states together predict the next token:

    s_0 = SiLU(W e(t_0) + b)            s_i = SiLU(W e(t_i) + U s_(i-1) + b)
    u = SiLU(A s_i + B h + c)           u = u + SiLU(D u + d), for every further block
    logits_i = O (h + P u)

e is the target's embedding. O is the target's output matrix, which is then not stored in the file,
or another one; it may be cut to a draft vocabulary. In the paper, the blocks are as wide as both
states together, and a trained O takes their result. Here they are as wide as h, and P maps their
result to the input of the target's O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.heads.base import Head

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
    shares_target  whether O is the target's
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
    shares_target: bool
    tokens: npt.NDArray[np.int32] | None

    def matrices(self) -> tuple[Floats, ...]:
        """The arrays of the forward pass, in the order of the fields."""
        return (
            self.token,
            self.recurrent,
            self.bias,
            self.mixing,
            self.mixing_bias,
            self.blocks,
            self.block_biases,
            self.projection,
            self.output,
        )


class RecurrentHead(Protocol):
    """A recurrent head as the drafter sees it; tests use a fake."""

    @property
    def tokens(self) -> npt.NDArray[np.int32] | None:
        """The target's ids of the draft vocabulary, (n_drafted,); None = the whole vocabulary."""
        ...

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        """The next level of each part."""
        ...


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


def _split(parts: Sequence[Beams], values: Floats, states: Any) -> list[Level]:
    """The levels of the parts, whose rows follow each other."""
    levels, first = [], 0
    for part in parts:
        end = first + len(part.tokens)
        levels.append(Level(values[first:end], states[first:end], part.hidden))
        first = end
    return levels


class ReDrafterHead(Head):
    """The head in NumPy, on the CPU."""

    def __init__(self, weights: ReDrafterWeights, embeddings: Embeddings) -> None:
        """``embeddings`` returns the target's embeddings."""
        self.tokens = weights.tokens
        self._weights = weights
        self._embeddings = embeddings
        n_embd = len(weights.bias)
        self._state_matrix = np.ascontiguousarray(weights.mixing[:, :n_embd])
        self._hidden_matrix = np.ascontiguousarray(weights.mixing[:, n_embd:])

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        w = self._weights
        sizes = [len(part.tokens) for part in parts]
        hidden = np.stack([part.hidden for part in parts])
        # B h + c is the same for all rows of a text.
        offset = np.repeat(hidden @ self._hidden_matrix.T + w.mixing_bias, sizes, axis=0)
        inner = self._embeddings([token for part in parts for token in part.tokens]) @ w.token.T
        inner += w.bias
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            if part.states is not None:
                inner[first : first + size] += part.states @ w.recurrent.T
            first += size
        states = _silu(inner)
        u = _silu(states @ self._state_matrix.T + offset)
        for matrix, bias in zip(w.blocks, w.block_biases, strict=True):
            u += _silu(u @ matrix.T + bias)
        z = np.repeat(hidden, sizes, axis=0) + u @ w.projection.T
        # OpenBLAS is over twice as fast with the large matrix on the left, see ``heads.medusa``.
        return _split(parts, (w.output @ z.T).T, states)


class ReDrafterHeadOnGPU(Head):
    """The head in PyTorch, with its weights on the GPU."""

    def __init__(
        self, weights: ReDrafterWeights, embeddings: Embeddings, torch: Any, device: str = "cuda"
    ) -> None:
        """``torch`` is the module, ``device`` the PyTorch device to use."""
        self.tokens = weights.tokens
        self._embeddings = embeddings
        self._torch = torch
        self._device = device
        self._matrices = [self._to_device(array) for array in weights.matrices()]

    def _to_device(self, array: Floats) -> Any:
        return self._torch.from_numpy(np.array(array, np.float32)).to(self._device)

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        torch, functional = self._torch, self._torch.nn.functional
        token, recurrent, bias, mixing, mixing_bias, *rest = self._matrices
        blocks, block_biases, projection, output = rest
        sizes = [len(part.tokens) for part in parts]
        embeddings = self._embeddings([token for part in parts for token in part.tokens])
        with torch.inference_mode():
            hidden = self._to_device(
                np.repeat(np.stack([part.hidden for part in parts]), sizes, axis=0)
            )
            inner = self._to_device(embeddings) @ token.T + bias
            first = 0
            for part, size in zip(parts, sizes, strict=True):
                if part.states is not None:
                    inner[first : first + size] += part.states @ recurrent.T
                first += size
            states = functional.silu(inner)
            u = functional.silu(torch.cat([states, hidden], dim=1) @ mixing.T + mixing_bias)
            for matrix, block_bias in zip(blocks, block_biases, strict=True):
                u = u + functional.silu(u @ matrix.T + block_bias)
            z = hidden + u @ projection.T
            values: Floats = (z @ output.T).cpu().numpy()
        return _split(parts, values, states)


def _silu(inner: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
        denominator: Floats = np.exp(-inner)
    denominator += 1.0
    return inner / denominator
