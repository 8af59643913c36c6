"""ReDrafter's head: a small recurrent network that drafts from one hidden state of the target.

Cheng et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large Language Models", arXiv
2403.09919. After the text's last token t_0, chosen from the target's state h, every drafted token
t_s advances a state of the network's own, and both states together say what follows:

    s_0 = SiLU(W e(t_0) + b)            s_i = SiLU(W e(t_i) + U s_(i-1) + b)
    u = SiLU(A s_i + B h + c)           u = u + SiLU(D u + d), for every further block
    logits_i = O (h + P u)

e is the target's own embedding. O is the target's own output matrix, which the file then does
without, or another; it may be cut to the tokens that are drafted at all. The paper's blocks are as
wide as both states together, and its O is trained and reads them as they are; here they are as wide
as h, and P leads back to what the target's own O reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.drafting.tree_growth import Scores

Embeddings = Callable[[Sequence[int]], Floats]  # of tokens, (n, n_embd)


@dataclass(frozen=True)
class ReDrafterWeights:
    """The head as matrices.

    token      W, (n_embd, n_embd)
    recurrent  U, (n_embd, n_embd)
    bias       b, (n_embd,)
    mixing     [A B], (n_embd, 2 n_embd)
    mixing_bias  c, (n_embd,)
    blocks     D of every further block, (n_blocks, n_embd, n_embd)
    block_biases  d of each, (n_blocks, n_embd)
    projection P, (n_embd, n_embd)
    output     O, (n_drafted, n_embd)
    shares_target  whether O is the target's own
    tokens     the token of each row of O, (n_drafted,); None where that is the row's own number
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
        """What the forward pass multiplies with and adds, in the order of the fields."""
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
    """What drafting needs of the head; tests have a fake."""

    @property
    def tokens(self) -> npt.NDArray[np.int32] | None:
        """The target's ids of the tokens of its logits, (n_drafted,), where they are not all."""
        ...

    def root(self, hidden: Floats, token: int) -> Scores:
        """The logits after the text's last token, row 0; ``hidden`` is the state it came from."""
        ...

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Scores:
        """The logits after ``tokens``, which follow rows ``parents`` of the call before."""
        ...


class Rows(NamedTuple):
    """Logits by row, (n, n_drafted)."""

    values: Floats

    def logits(self, row: int) -> Floats:
        found: Floats = self.values[row]
        return found


class ReDrafterHead:
    """The forward pass in NumPy, for the CPU."""

    def __init__(self, weights: ReDrafterWeights, embeddings: Embeddings) -> None:
        """``embeddings`` gives the target's own, of tokens by its ids."""
        self.tokens = weights.tokens
        self._weights = weights
        self._embeddings = embeddings
        n_embd = len(weights.bias)
        self._of_state = np.ascontiguousarray(weights.mixing[:, :n_embd])
        self._of_hidden = np.ascontiguousarray(weights.mixing[:, n_embd:])
        self._hidden: Floats = np.zeros(n_embd, np.float32)
        self._constant: Floats = weights.mixing_bias  # B h + c, the same for every row of a step
        self._states: Floats = np.zeros((0, n_embd), np.float32)

    def root(self, hidden: Floats, token: int) -> Rows:
        self._hidden = hidden
        self._constant = self._of_hidden @ hidden + self._weights.mixing_bias
        return self._advance([token], None)

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        return self._advance(tokens, self._states[list(parents)])

    def _advance(self, tokens: Sequence[int], above: Floats | None) -> Rows:
        w = self._weights
        inner = self._embeddings(tokens) @ w.token.T + w.bias
        if above is not None:
            inner += above @ w.recurrent.T
        self._states = _silu(inner)
        u = _silu(self._states @ self._of_state.T + self._constant)
        for matrix, bias in zip(w.blocks, w.block_biases, strict=True):
            u += _silu(u @ matrix.T + bias)
        z = self._hidden + u @ w.projection.T
        # OpenBLAS is more than twice as fast with the large matrix on the left, see heads.medusa.
        values: Floats = (w.output @ z.T).T
        return Rows(values)


class ReDrafterHeadOnGPU:
    """The same in PyTorch, where what the head weighs is on the GPU."""

    def __init__(
        self, weights: ReDrafterWeights, embeddings: Embeddings, torch: Any, device: str = "cuda"
    ) -> None:
        """``torch`` is the module; ``device`` is where it computes."""
        self.tokens = weights.tokens
        self._embeddings = embeddings
        self._torch = torch
        self._device = device
        self._matrices = [self._there(part) for part in weights.matrices()]
        self._hidden: Any = None
        self._states: Any = None

    def root(self, hidden: Floats, token: int) -> Rows:
        self._hidden = self._there(hidden)
        self._states = None
        return self._advance([token])

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        self._states = self._states[list(parents)]
        return self._advance(tokens)

    def _there(self, part: Floats) -> Any:
        return self._torch.from_numpy(np.array(part, np.float32)).to(self._device)

    def _advance(self, tokens: Sequence[int]) -> Rows:
        torch, functional = self._torch, self._torch.nn.functional
        token, recurrent, bias, mixing, mixing_bias, *rest = self._matrices
        blocks, block_biases, projection, output = rest
        with torch.inference_mode():
            inner = self._there(self._embeddings(tokens)) @ token.T + bias
            if self._states is not None:
                inner = inner + self._states @ recurrent.T
            self._states = functional.silu(inner)
            both = torch.cat([self._states, self._hidden.expand(len(tokens), -1)], dim=1)
            u = functional.silu(both @ mixing.T + mixing_bias)
            for matrix, more in zip(blocks, block_biases, strict=True):
                u = u + functional.silu(u @ matrix.T + more)
            z = self._hidden + u @ projection.T
            values: Floats = (z @ output.T).cpu().numpy()
        return Rows(values)


def _silu(inner: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-inner) is infinite where SiLU is zero
        below: Floats = np.exp(-inner)
    below += 1.0
    return inner / below
