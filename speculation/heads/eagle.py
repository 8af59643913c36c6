"""EAGLE's head: one decoder layer that foretells the target's next state instead of its next token.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv
2401.15077. A row stands for a token of the text, and knows the state before it:

    x_t = F [e(token_t); f_(t-1)] + b        f_t = norm(layer(x_0 … x_t))        logits_t = O f_t

e is the target's own embedding, O its own output matrix, f its state after the final norm, of which
the head's is a guess. F is applied in NumPy. The layer is a Llama layer and is run by llama.cpp, as
a model of one layer that is fed with embeddings; the file of that model is put together when the
heads are loaded, since O is already in the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from batching.llama.model import Model
from batching.target import Output
from batching.tree import Floats
from speculation.heads.base import HeadInContext


@dataclass(frozen=True)
class EagleShape:
    """Sizes of the layer.

    n_head, n_head_kv  heads of the attention, and of its keys and values
    n_ff               width of the feed-forward block
    rope_base, norm_eps  as in the target
    """

    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the head's tensors by name; those of the layer have llama.cpp's names."""
        n, n_kv = self.n_embd, self.n_embd // self.n_head * self.n_head_kv
        return {
            "fc.weight": (n, 2 * n),
            "fc.bias": (n,),
            "blk.0.attn_norm.weight": (n,),
            "blk.0.attn_q.weight": (n, n),
            "blk.0.attn_k.weight": (n_kv, n),
            "blk.0.attn_v.weight": (n_kv, n),
            "blk.0.attn_output.weight": (n, n),
            "blk.0.ffn_norm.weight": (n,),
            "blk.0.ffn_gate.weight": (self.n_ff, n),
            "blk.0.ffn_up.weight": (self.n_ff, n),
            "blk.0.ffn_down.weight": (n, self.n_ff),
            "output_norm.weight": (n,),
        }


class EagleHead(HeadInContext):
    """F in NumPy, the layer in llama.cpp."""

    needs_hidden = True
    layers: tuple[int, ...] = ()

    def __init__(
        self,
        weight: Floats,
        bias: Floats,
        embeddings: Callable[[Sequence[int]], Floats],
        layer: Path,
        *,
        tokens: npt.NDArray[np.int32] | None = None,
        folder: TemporaryDirectory[str] | None = None,
        n_gpu_layers: int | None = None,
    ) -> None:
        """``weight`` and ``bias`` are F and b, (n_embd, 2 n_embd) and (n_embd,).

        ``embeddings`` gives the target's embeddings of tokens, (n, n_embd). ``layer`` is the GGUF
        of the layer, in ``folder`` if that is to go with the head. ``tokens`` are the target's ids
        of what it drafts, (n_drafted,), where that is not everything.
        """
        super().__init__(Model(layer, n_gpu_layers=n_gpu_layers))
        n_embd = len(bias)
        self._of_token = np.ascontiguousarray(weight[:, :n_embd].T)  # (n_embd, n_embd)
        self._of_state = np.ascontiguousarray(weight[:, n_embd:].T)
        self._bias = bias
        self._embeddings = embeddings
        self.tokens = tokens
        self._folder = folder

    def states_of(self, output: Output, row: int) -> Floats:
        return output.hidden(row)

    def encode(self, states: Floats) -> Floats:
        return states

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        rows: Floats = self._embeddings(tokens) @ self._of_token
        rows += states @ self._of_state
        rows += self._bias
        return rows

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            self._folder.cleanup()
