"""Reads the source GGUF and writes the upscaled one, one tensor at a time."""

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
from tools.upscale.tensors import VOCAB, Plan, new_shape, plans, upscaled_tensor

ARCHITECTURE = "llama"
TYPES = tuple(FILE_TYPES)  # of the matrices
UNBLOCKED = ("f32", "f16", "bf16")  # all other types pack BLOCK weights of a row
SIZE_LABEL = "general.size_label"  # omitted: it would claim a larger model


class Source:
    """A memory-mapped Llama-architecture GGUF: its shape, metadata and tensors.

    Raises ModelError for an invalid GGUF, UpscaleError for another architecture or missing sizes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = Weights(path)
        architecture = self.gguf.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise UpscaleError(
                f"{path} has the architecture {architecture!r}; only {ARCHITECTURE!r} models can "
                f"be upscaled"
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
                f"{self.path} has no token_embd.weight and is not a complete model; give one that "
                f"is"
            )
        return embedding.shape[0]

    def _read_shape(self) -> Shape:
        width = self._integer("embedding_length")
        heads = self._integer("attention.head_count")
        head_dim = int(self.value("attention.key_length") or width // heads)
        value_dim = int(self.value("attention.value_length") or head_dim)
        if value_dim != head_dim:
            raise UpscaleError(
                f"{self.path}: the head size is {head_dim} for keys and {value_dim} for values; "
                f"only models with equal sizes can be upscaled"
            )
        kv_heads = self.value("attention.head_count_kv")
        return Shape(
            width=width,
            layers=self._integer("block_count"),
            hidden=self._integer("feed_forward_length"),
            heads=heads,
            kv_heads=heads if kv_heads is None else self._integer("attention.head_count_kv"),
            head_dim=head_dim,
            norm_eps=float(self.value("attention.layer_norm_rms_epsilon") or 0),
        )

    def _integer(self, key: str) -> int:
        value = self.value(key)
        if not isinstance(value, int):
            raise UpscaleError(
                f"{self.path}: {ARCHITECTURE}.{key} is {value!r}, not an integer; "
                f"only models with identical layers can be upscaled"
            )
        return value


def write_upscaled(
    source: Source,
    out: Path,
    to: Shape,
    kind: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write ``source`` upscaled to ``to``, with matrices of the type ``kind`` and vectors in F32.

    Keeps one tensor in memory at a time. ``progress(bytes_done, bytes_total)`` is called after
    each. Raises UpscaleError if the type does not fit the shape or the disk is too full, DiskFull
    if it fills up while writing; a partial file is removed.
    """
    if kind not in UNBLOCKED:
        for sizes in (source.shape, to):
            sizes.check_blocks(kind)
    rng = np.random.default_rng(0)
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
    """A tensor of the new model: matrices have the type ``kind``, vectors F32."""
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
        values = upscaled_tensor(values, plan.kind, shape, widening, rng)
    assert values is not None  # what is new has a kind
    return encode(values, written_as)


def _check_size(source: Source, plan: Plan) -> None:
    """Raise UpscaleError if a tensor's shape contradicts the metadata."""
    assert plan.kind is not None
    found = source.gguf.tensors[plan.name].shape
    expected = tuple(
        source.n_vocab if axis == VOCAB else source.shape.size(axis) for axis in plan.kind.axes
    )
    if found != expected:
        raise UpscaleError(
            f"{source.path}: {plan.name} has the shape {found}, but by the metadata it should be "
            f"{expected}; this is not a plain Llama model"
        )


def _check_room(out: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < n_bytes:
        raise UpscaleError(
            f"{out} needs {n_bytes / 2**30:.1f} GiB, but its disk has {free / 2**30:.1f} GiB free; "
            f"choose smaller sizes, a smaller --type or another disk"
        )


def _metadata(source: Source, to: Shape, kind: str, n_params: int) -> dict[str, Value]:
    """The source's metadata with the new sizes, and a name and description that say what it is."""
    before = source.shape
    new: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.name": f"function-preserving upscaling of {source.name}",
        "general.description": (
            f"Function-preserving upscaling of {source.name}: the same logits at the cost of "
            f"{n_params / 1e6:,.0f}M parameters, for measuring speed. It is no better model. "
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
