"""EAGLE's head: one decoder layer that predicts the target's next hidden state.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv
2401.15077. Each row combines a token of the text with the state before it:

    x_t = F [e(token_t); f_(t-1)] + b        f_t = norm(layer(x_0 … x_t))        logits_t = O f_t

e is the target's embedding, O its output matrix, and f its state after the final norm, or the
head's prediction of that state. NumPy applies F. The layer is a Llama layer; llama.cpp runs it as a
one-layer model that takes embeddings. Loading the head writes that model to a temporary file, so
that the head's own file need not include O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from batching.errors import ModelError
from batching.gguf.reader import GGUFFile
from batching.gguf.writer import NewTensor, Value, write_gguf
from batching.llama.model import Model
from batching.llama.weights import Weights
from batching.target import Output
from batching.tree import Floats
from speculation.heads.base import HeadInContext
from speculation.heads.file import HeadsFile, HeadsInfo, own_format, write_heads


@dataclass(frozen=True)
class EagleShape:
    """Sizes of the layer.

    n_head, n_head_kv  attention heads, and key-value heads
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
        """Shapes of the head's tensors by name; the layer's tensors have llama.cpp's names."""
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

    def metadata(self, architecture: str, n_vocab: int) -> dict[str, Value]:
        """The metadata of a GGUF with one such layer."""
        values: dict[str, Value] = {
            "context_length": 1 << 20,  # without effect, since positions are relative
            "embedding_length": self.n_embd,
            "block_count": 1,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": float(self.norm_eps),
            "rope.dimension_count": self.n_embd // self.n_head,
            "rope.freq_base": float(self.rope_base),
            "vocab_size": n_vocab,
        }
        return {f"{architecture}.{key}": value for key, value in values.items()}


class EagleHead(HeadInContext):
    """EAGLE's head, with F in NumPy and the layer in llama.cpp."""

    needs_hidden = True

    def __init__(self, file: HeadsFile, target: Model) -> None:
        """Write the layer's model to a temporary file and load it.

        Raises ModelError if the file's tensors contradict its metadata, UnsupportedModel if the
        target's file has no output matrix or no embeddings.
        """
        shape = read_shape(file)
        for name, sizes in shape.tensors.items():
            file.check_tensor(name, *sizes)
        self.tokens, weights, n = file.tokens(), Weights(target.path), shape.n_embd
        self._folder = TemporaryDirectory(prefix="speculation-", ignore_cleanup_errors=True)
        try:
            layer = Path(self._folder.name) / "layer.gguf"
            write_layer(layer, file, shape, weights, self.tokens)
            super().__init__(Model(layer, placement=target.placement))
        except BaseException:
            self._folder.cleanup()
            raise
        self._embeddings = partial(weights.rows, "token_embd.weight")
        matrix = file.gguf.tensor("fc.weight")
        self._token_matrix = np.ascontiguousarray(matrix[:, :n].T)  # (n_embd, n_embd)
        self._state_matrix = np.ascontiguousarray(matrix[:, n:].T)
        self._bias = file.gguf.tensor("fc.bias")

    def states_of(self, output: Output, row: int) -> Floats:
        return output.hidden(row)

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        rows: Floats = self._embeddings(tokens) @ self._token_matrix
        rows += states @ self._state_matrix
        rows += self._bias
        return rows

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


KIND = own_format("eagle", EagleHead)
# Fields of EagleShape, and what a head's file calls them.
_KEYS: dict[str, tuple[str, type[int | float]]] = {
    "n_head": ("eagle.head_count", int),
    "n_head_kv": ("eagle.head_count_kv", int),
    "n_ff": ("eagle.feed_forward_length", int),
    "rope_base": ("eagle.rope_freq_base", float),
    "norm_eps": ("eagle.norm_epsilon", float),
}


def read_shape(file: HeadsFile) -> EagleShape:
    """Read the layer's sizes from the metadata. Raises ModelError if they are inconsistent."""
    values = {field: file.value(key, kind) for field, (key, kind) in _KEYS.items()}
    shape = EagleShape(file.info.n_embd, **values)
    if (
        min(shape.n_head, shape.n_head_kv, shape.n_ff) < 1
        or shape.n_embd % (2 * shape.n_head)
        or shape.n_head % shape.n_head_kv
    ):
        raise ModelError(
            f"{file.path}: states {shape.n_embd} wide do not split into {shape.n_head} attention "
            f"heads with {shape.n_head_kv} key-value heads; train the heads again"
        )
    return shape


def write_layer(
    path: Path,
    file: HeadsFile,
    shape: EagleShape,
    target: GGUFFile,
    tokens: npt.NDArray[np.int32] | None = None,
) -> None:
    """Write a one-layer model for llama.cpp, with the target's output matrix in its stored type.

    It has no tokenizer. Output and embeddings are tied, because the embeddings are not used.
    """
    name = target.output_name
    matrix, rows = target.tensors[name], target.raw(name)
    if matrix.shape != (file.info.n_vocab, file.info.n_embd):
        raise ModelError(
            f"the output matrix of {target.path.name} is {' × '.join(map(str, matrix.shape))}, not "
            f"{file.info.n_vocab} × {file.info.n_embd}, so no head can share it"
        )
    if tokens is not None:
        rows = rows[tokens]
    n_drafted = len(rows)
    tensors = {"token_embd.weight": NewTensor((n_drafted, shape.n_embd), matrix.type, lambda: rows)}
    for name in shape.tensors:
        if not name.startswith("fc."):
            tensor = file.gguf.tensors[name]
            tensors[name] = NewTensor(tensor.shape, tensor.type, partial(file.gguf.raw, name))
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "general.name": f"EAGLE's layer for {file.info.target_name}",
        **shape.metadata("llama", n_drafted),
        "tokenizer.ggml.model": "no_vocab",
    }
    write_gguf(path, metadata, tensors)


def write_eagle(
    path: Path,
    info: HeadsInfo,
    shape: EagleShape,
    tensors: Mapping[str, Floats],
    *,
    tokens: npt.NDArray[np.int32] | None = None,
    kind: str = "q8_0",
) -> None:
    """Write a head to a GGUF.

    tensors  by the names in ``shape.tensors``
    tokens   the draft vocabulary, (n_drafted,); None = the whole vocabulary
    kind     type of the matrices, see ``new_tensor``
    """
    metadata = {key: kind(getattr(shape, field)) for field, (key, kind) in _KEYS.items()}
    write_heads(path, info, metadata, tensors, tokens=tokens, kind=kind)
