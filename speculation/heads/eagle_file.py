"""Reads and writes files of EAGLE heads, and builds the one-layer model that llama.cpp runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.gguf.writer import NewTensor, Value, write_gguf
from batching.llama.model import Model
from batching.llama.weights import Weights
from batching.tree import Floats
from speculation.heads.eagle import EagleHead, EagleShape
from speculation.heads.file import HeadsFile, HeadsInfo, write_heads
from speculation.heads.kind import own_format


def load_eagle(file: HeadsFile, model: Model) -> EagleHead:
    """Load the head for ``model``, after ``HeadsFile.check_target``; ``start`` it before drafting.

    Raises HeadsError if the file's tensors contradict its metadata, UnsupportedModel if the
    target's file has no output matrix or no embeddings.
    """
    shape = read_shape(file)
    for name, sizes in shape.tensors.items():
        file.check_tensor(name, *sizes)
    tokens = file.tokens()
    target = Weights(model.path)
    folder = TemporaryDirectory(prefix="speculation-", ignore_cleanup_errors=True)
    try:
        layer = Path(folder.name) / "layer.gguf"
        write_layer(layer, file, shape, target, tokens)
        return EagleHead(
            file.gguf.tensor("fc.weight"),
            file.gguf.tensor("fc.bias"),
            partial(target.rows, "token_embd.weight"),
            layer,
            tokens=tokens,
            folder=folder,
            placement=model.placement,
        )
    except BaseException:
        folder.cleanup()
        raise


KIND = own_format("eagle", load_eagle)


def read_shape(file: HeadsFile) -> EagleShape:
    """Read the layer's sizes from the metadata. Raises HeadsError if they are inconsistent."""
    shape = EagleShape(
        n_embd=file.info.n_embd,
        n_head=file.value("eagle.head_count", int),
        n_head_kv=file.value("eagle.head_count_kv", int),
        n_ff=file.value("eagle.feed_forward_length", int),
        rope_base=file.value("eagle.rope_freq_base", float),
        norm_eps=file.value("eagle.norm_epsilon", float),
    )
    if (
        min(shape.n_head, shape.n_head_kv, shape.n_ff) < 1
        or shape.n_embd % (2 * shape.n_head)
        or shape.n_head % shape.n_head_kv
    ):
        raise HeadsError(
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
        raise HeadsError(
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
        **shape.metadata("llama", 1, n_drafted),
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
    metadata: dict[str, int | float] = {
        "eagle.head_count": shape.n_head,
        "eagle.head_count_kv": shape.n_head_kv,
        "eagle.feed_forward_length": shape.n_ff,
        "eagle.rope_freq_base": float(shape.rope_base),
        "eagle.norm_epsilon": float(shape.norm_eps),
    }
    write_heads(path, info, metadata, tensors, tokens=tokens, kind=kind)
