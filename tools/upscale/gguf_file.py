"""Reading the source's GGUF and writing the upscaled one, a tensor at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from batching.gguf.writer import (
    FILE_TYPES,
    QUANTIZATION_VERSION,
    Array,
    NewTensor,
    TensorType,
    Value,
    n_bytes,
    write_gguf,
)
from batching.llama.weights import Weights, encode
from tools.upscale.shape import Shape, UpscaleError
from tools.upscale.tensors import VOCAB, Plan, grown, new_shape, plans

ARCHITECTURE = "llama"
TYPES = tuple(FILE_TYPES)  # of the matrices
UNBLOCKED = ("f32", "f16", "bf16")  # the others pack BLOCK weights of a row at a time
SIZE_LABEL = "general.size_label"  # left out: it would claim a size class


class Source:
    """A Llama-architecture GGUF, mapped into memory: its shape, metadata and tensors.

    Raises ModelError for a file that is no whole GGUF, UpscaleError for one of another
    architecture or without its sizes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = Weights(path)
        architecture = self.gguf.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise UpscaleError(
                f"{path} has the architecture {architecture!r}; only {ARCHITECTURE!r} can be "
                f"upscaled with its function kept"
            )
        self.name = str(self.gguf.metadata.get("general.name") or path.stem)
        self.shape = self._read_shape()
        self.n_vocab = self._n_vocab()

    def value(self, key: str) -> Any:
        """A metadata value of the architecture, or None."""
        return self.gguf.metadata.get(f"{ARCHITECTURE}.{key}")

    def _n_vocab(self) -> int:
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None:
            raise UpscaleError(
                f"{self.path} has no token_embd.weight: it holds no whole model; give one that does"
            )
        return embedding.shape[0]

    def _read_shape(self) -> Shape:
        width = self._whole("embedding_length")
        heads = self._whole("attention.head_count")
        head_dim = int(self.value("attention.key_length") or width // heads)
        value_dim = int(self.value("attention.value_length") or head_dim)
        if value_dim != head_dim:
            raise UpscaleError(
                f"{self.path}: keys have {head_dim} values a head and values {value_dim}; "
                f"only models where they are alike can be upscaled"
            )
        kv_heads = self.value("attention.head_count_kv")
        return Shape(
            width=width,
            layers=self._whole("block_count"),
            hidden=self._whole("feed_forward_length"),
            heads=heads,
            kv_heads=heads if kv_heads is None else self._whole("attention.head_count_kv"),
            head_dim=head_dim,
            norm_eps=float(self.value("attention.layer_norm_rms_epsilon") or 0),
        )

    def _whole(self, key: str) -> int:
        value = self.value(key)
        if not isinstance(value, int):
            raise UpscaleError(
                f"{self.path}: {ARCHITECTURE}.{key} is {value!r}, not one whole number; "
                f"only models whose layers are all alike can be upscaled"
            )
        return value


def write_upscaled(
    source: Source,
    out: Path,
    to: Shape,
    kind: str,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write ``source`` upscaled to ``to``, matrices in the type ``kind``, vectors in F32.

    One tensor is in memory at a time. ``progress(bytes_done, bytes_total)`` is called after each.
    Raises UpscaleError when the type does not suit the shape, DiskFull when the disk has no room; a
    file that was begun is removed.
    """
    if kind not in UNBLOCKED:
        for sizes in (source.shape, to):
            sizes.check_blocks(kind)
    rng = np.random.default_rng(seed)
    tensors = {
        plan.name: _planned(source, plan, to, TensorType[kind.upper()], rng)
        for plan in plans(list(source.gguf.tensors), source.shape.layers, to.layers)
    }
    _check_room(out, sum(n_bytes(tensor.shape, tensor.type) for tensor in tensors.values()))
    n_params = sum(math.prod(tensor.shape) for tensor in tensors.values())
    write_gguf(out, _metadata(source, to, kind, n_params), tensors, progress)


def _planned(
    source: Source, plan: Plan, to: Shape, kind: TensorType, rng: np.random.Generator
) -> NewTensor:
    """A tensor of the new model: a matrix in the type ``kind``, a vector in F32."""
    if plan.kind is None:
        shape = source.gguf.tensors[plan.name].shape
    else:
        shape = new_shape(plan.kind, to, source.n_vocab)
        if plan.source:
            _check_size(source, plan)
    written_as = kind if len(shape) > 1 else TensorType.F32
    widening = to.width / source.shape.width
    return NewTensor(
        shape, written_as, partial(_data, source, plan, shape, written_as, widening, rng)
    )


def _data(
    source: Source,
    plan: Plan,
    shape: tuple[int, ...],
    written_as: TensorType,
    widening: float,
    rng: np.random.Generator,
) -> Array:
    values = source.gguf.tensor(plan.name) if plan.source else None
    if plan.kind is not None:
        values = grown(values, plan.kind, shape, widening, rng)
    assert values is not None  # what is new has a kind
    return encode(values, written_as)


def _check_size(source: Source, plan: Plan) -> None:
    """A tensor that is not of the size that the metadata say would be put into the wrong place."""
    assert plan.kind is not None
    found = source.gguf.tensors[plan.name].shape
    expected = tuple(
        source.n_vocab if axis == VOCAB else source.shape.size(axis) for axis in plan.kind.axes
    )
    if found != expected:
        raise UpscaleError(
            f"{source.path}: {plan.name} is {found} and its metadata say {expected}; "
            f"this is no plain Llama model"
        )


def _check_room(out: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < n_bytes:
        raise UpscaleError(
            f"{out} takes {n_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free there; "
            f"choose smaller sizes, a smaller --type or another disk"
        )


def _metadata(source: Source, to: Shape, kind: str, n_params: int) -> dict[str, Value]:
    """The source's metadata with the new sizes, and a name that says what this is."""
    before = source.shape
    new: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.name": f"function-preserving upscaling of {source.name}",
        "general.description": (
            f"Function-preserving upscaling of {source.name}: the same logits at the cost of "
            f"{n_params / 1e6:,.0f}M parameters, for measuring speed. It is no larger model. "
            f"Width {before.width} -> {to.width}, layers {before.layers} -> {to.layers}, "
            f"hidden {before.hidden} -> {to.hidden}."
        ),
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        "llama.embedding_length": to.width,
        "llama.block_count": to.layers,
        "llama.feed_forward_length": to.hidden,
        "llama.attention.head_count": to.heads,
        "llama.attention.head_count_kv": to.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": to.norm_eps,
    }
    for key, value in source.gguf.encoded_metadata().items():
        if key not in (*new, SIZE_LABEL) and not key.startswith("split."):
            new[key] = value
    return new
