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
from speculation.drafting.tree_growth import Scores

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

    def root(self, hidden: Floats, token: int) -> Scores:
        """Logits after ``token``, the text's last, in row 0; it was chosen from ``hidden``."""
        ...

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Scores:
        """Logits after ``tokens``, which follow the rows ``parents`` of the previous call."""
        ...


class Rows(NamedTuple):
    """Logits by row, (n, n_drafted)."""

    values: Floats

    def logits(self, row: int) -> Floats:
        logits: Floats = self.values[row]
        return logits


class ReDrafterHead:
    """The head in NumPy, on the CPU."""

    def __init__(self, weights: ReDrafterWeights, embeddings: Embeddings) -> None:
        """``embeddings`` returns the target's embeddings."""
        self.tokens = weights.tokens
        self._weights = weights
        self._embeddings = embeddings
        n_embd = len(weights.bias)
        self._state_matrix = np.ascontiguousarray(weights.mixing[:, :n_embd])
        self._hidden_matrix = np.ascontiguousarray(weights.mixing[:, n_embd:])
        self._hidden: Floats = np.zeros(n_embd, np.float32)
        self._offset: Floats = weights.mixing_bias  # B h + c, the same for all rows of a step
        self._states: Floats = np.zeros((0, n_embd), np.float32)

    def root(self, hidden: Floats, token: int) -> Rows:
        self._hidden = hidden
        self._offset = self._hidden_matrix @ hidden + self._weights.mixing_bias
        return self._advance([token], None)

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        return self._advance(tokens, self._states[list(parents)])

    def _advance(self, tokens: Sequence[int], states: Floats | None) -> Rows:
        w = self._weights
        inner = self._embeddings(tokens) @ w.token.T + w.bias
        if states is not None:
            inner += states @ w.recurrent.T
        self._states = _silu(inner)
        u = _silu(self._states @ self._state_matrix.T + self._offset)
        for matrix, bias in zip(w.blocks, w.block_biases, strict=True):
            u += _silu(u @ matrix.T + bias)
        z = self._hidden + u @ w.projection.T
        # OpenBLAS is over twice as fast with the large matrix on the left, see ``heads.medusa``.
        values: Floats = (w.output @ z.T).T
        return Rows(values)


class ReDrafterHeadOnGPU:
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
        self._hidden: Any = None
        self._states: Any = None

    def root(self, hidden: Floats, token: int) -> Rows:
        self._hidden = self._to_device(hidden)
        self._states = None
        return self._advance([token])

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        self._states = self._states[list(parents)]
        return self._advance(tokens)

    def _to_device(self, array: Floats) -> Any:
        return self._torch.from_numpy(np.array(array, np.float32)).to(self._device)

    def _advance(self, tokens: Sequence[int]) -> Rows:
        torch, functional = self._torch, self._torch.nn.functional
        token, recurrent, bias, mixing, mixing_bias, *rest = self._matrices
        blocks, block_biases, projection, output = rest
        with torch.inference_mode():
            inner = self._to_device(self._embeddings(tokens)) @ token.T + bias
            if self._states is not None:
                inner = inner + self._states @ recurrent.T
            self._states = functional.silu(inner)
            both = torch.cat([self._states, self._hidden.expand(len(tokens), -1)], dim=1)
            u = functional.silu(both @ mixing.T + mixing_bias)
            for matrix, block_bias in zip(blocks, block_biases, strict=True):
                u = u + functional.silu(u @ matrix.T + block_bias)
            z = self._hidden + u @ projection.T
            values: Floats = (z @ output.T).cpu().numpy()
        return Rows(values)


def _silu(inner: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
        denominator: Floats = np.exp(-inner)
    denominator += 1.0
    return inner / denominator
