"""python -m tools.upscale: a small model's behaviour at a large model's cost.

A method's speed-up depends on what the model writes and on the cost of a row. This tool separates
the two: from a Llama-architecture GGUF it makes a wider and deeper one that computes the same
function (function-preserving upscaling). The logits, and so the texts, drafts and acceptance, are
the small model's, while the matrices have the requested size. The result knows no more than the
source; its metadata say so.

How the function is preserved, with d the source's width and D the new one:

- The hidden state is zero in the new D - d dimensions, and so are the columns of the embedding and
  the rows of the matrices that write to it (attn_output, ffn_down).
- RMSNorm now averages over D values, of which d are nonzero: sum / D + eps' is d/D of
  sum / d + eps if eps' = eps * d/D. A factor sqrt(d/D) in the norms' weights compensates.
- Heads keep their size, so RoPE and the softmax scale do not change. New heads and new hidden units
  compute something, but the columns that would read them are zero.
- New layers add nothing: their attn_output and ffn_down are zero.
- All other new weights are small random numbers, so that zeros cannot make them cheaper.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import SpeculationError
from batching.gguf.types import n_bytes
from batching.gguf.writer import (
    FILE_TYPES,
    QUANTIZATION_VERSION,
    Array,
    NewTensor,
    TensorType,
    Value,
    write_gguf,
)
from batching.llama.weights import Weights, encode
from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.console import run_command
from speculation.system.files import require_writable

Floats = npt.NDArray[np.float32]

ARCHITECTURE = "llama"
BLOCK = 32  # weights that share a scale in the quantised types
MAX_LAYERS = 512  # llama.cpp aborts with more
SIZE_LABEL = "general.size_label"  # omitted: it would claim a larger model
VOCAB = "vocab"  # the axis that keeps its size
RANDOM_SCALE = 0.02  # new weights are uniform in ±RANDOM_SCALE


class UpscaleError(SpeculationError):
    """The model cannot be upscaled, or not to that size."""


# Sizes


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model.

    width     of the hidden state (n_embd)
    layers    transformer blocks
    hidden    feed-forward units per block
    heads     query heads
    kv_heads  key/value heads, each shared by heads / kv_heads query heads
    head_dim  width of a head
    norm_eps  RMSNorm's epsilon
    """

    width: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float

    def size(self, axis: str) -> int:
        """Length of a tensor's axis: width, hidden, heads or kv_heads (both times head_dim)."""
        n: int = getattr(self, axis)
        return n * self.head_dim if axis.endswith("heads") else n

    def upscaled(self, width: int | None = None, layers: int | None = None) -> Shape:
        """The upscaled shape; ``hidden`` grows with the width. None keeps a size.

        The head size and the query heads per key head stay the same. Raises UpscaleError for
        smaller sizes, or a width that is not a whole number of heads.
        """
        width = self.width if width is None else width
        layers = self.layers if layers is None else layers
        for name, new, old in (("width", width, self.width), ("layers", layers, self.layers)):
            if new < old:
                raise UpscaleError(
                    f"--{name} is {new}, but the model has {old}; give at least that"
                )
        if layers > MAX_LAYERS:
            raise UpscaleError(
                f"--layers is {layers}, but llama.cpp supports at most {MAX_LAYERS}; give fewer"
            )
        group = self.heads // self.kv_heads
        step = self.head_dim * group
        least = self.heads * self.head_dim
        if width % step or width < least:
            below = max(width // step * step, least)
            raise UpscaleError(
                f"--width {width} is not {least} or more in steps of {step} (head size "
                f"{self.head_dim} x {group} query heads per key head); give {below} or "
                f"{below + step}"
            )
        heads = width // self.head_dim
        return replace(
            self,
            width=width,
            layers=layers,
            hidden=max(self.hidden, BLOCK * round(self.hidden * width / self.width / BLOCK)),
            heads=heads,
            kv_heads=heads // group,
            norm_eps=self.norm_eps * self.width / width,
        )


# Tensors


class Kind(NamedTuple):
    """The axes of a tensor, ``(row axis, column axis)`` or ``(axis,)``, and its new values.

    fill  zero    where other values would change the hidden state
          random  where a zero elsewhere cancels the result
          one     norms; scaled like the source's norms
    """

    axes: tuple[str, ...]
    fill: str

    def shape(self, sizes: Shape, n_vocab: int) -> tuple[int, ...]:
        """The tensor's shape, rows first."""
        return tuple(n_vocab if axis == VOCAB else sizes.size(axis) for axis in self.axes)


KINDS = {
    "token_embd.weight": Kind((VOCAB, "width"), "zero"),
    "output.weight": Kind((VOCAB, "width"), "random"),
    "output_norm.weight": Kind(("width",), "one"),
    "attn_norm.weight": Kind(("width",), "one"),
    "attn_q.weight": Kind(("heads", "width"), "random"),
    "attn_k.weight": Kind(("kv_heads", "width"), "random"),
    "attn_v.weight": Kind(("kv_heads", "width"), "random"),
    "attn_output.weight": Kind(("width", "heads"), "zero"),
    "ffn_norm.weight": Kind(("width",), "one"),
    "ffn_gate.weight": Kind(("hidden", "width"), "random"),
    "ffn_up.weight": Kind(("hidden", "width"), "random"),
    "ffn_down.weight": Kind(("width", "hidden"), "zero"),
    "attn_q.bias": Kind(("heads",), "zero"),
    "attn_k.bias": Kind(("kv_heads",), "zero"),
    "attn_v.bias": Kind(("kv_heads",), "zero"),
    "attn_output.bias": Kind(("width",), "zero"),
}
UNCHANGED = ("rope_freqs.weight",)  # depends on the head size, which stays the same


def plans(names: Sequence[str], layers: int, new_layers: int) -> Iterator[tuple[str, str | None]]:
    """The tensors of a model with ``new_layers`` layers, from one with ``layers`` and ``names``:
    each with the source's name for it, or None if it is new.

    New layers follow the old ones and have the first layer's tensors, except biases.
    """
    yield from zip(names, names, strict=True)
    first = [name for name in names if name.startswith("blk.0.") and name.endswith(".weight")]
    for layer in range(layers, new_layers):
        yield from ((name.replace("blk.0.", f"blk.{layer}.", 1), None) for name in first)


def kind_of(name: str) -> Kind | None:
    """The kind of a tensor; None = it is copied unchanged. Raises UpscaleError for another one."""
    if name in UNCHANGED:
        return None
    kind = KINDS.get(re.sub(r"^blk\.\d+\.", "", name))
    if kind is None:
        raise UpscaleError(
            f"the model has a tensor {name}, which is not part of a plain Llama model; only plain "
            f"ones can be upscaled (no experts, no adapters)"
        )
    return kind


def upscaled_tensor(
    values: Floats | None,
    kind: Kind,
    shape: tuple[int, ...],
    widening: float,
    rng: np.random.Generator,
) -> Floats:
    """A tensor of ``shape`` with ``values`` in its first corner; None = an entirely new tensor.

    ``widening`` is D/d; norms are divided by its square root.
    """
    if kind.fill == "random":
        result = rng.random(shape, dtype=np.float32)
        result -= 0.5
        result *= 2 * RANDOM_SCALE
    else:
        result = np.full(shape, 1.0 if kind.fill == "one" else 0.0, np.float32)
    if values is not None:
        result[tuple(slice(n) for n in values.shape)] = values
    if kind.fill == "one":
        result /= math.sqrt(widening)
    return result


# Files


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
        if "token_embd.weight" not in self.gguf.tensors:
            raise UpscaleError(f"{path} has no token_embd.weight; give a complete model")
        self.n_vocab = self.gguf.tensors["token_embd.weight"].shape[0]
        self.name = str(self.gguf.metadata.get("general.name") or path.stem)
        width, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", width // heads)
        if self._integer("attention.value_length", head_dim) != head_dim:
            raise UpscaleError(f"{path}: keys and values differ in size, so it cannot be upscaled")
        self.shape = Shape(
            width=width,
            layers=self._integer("block_count"),
            hidden=self._integer("feed_forward_length"),
            heads=heads,
            kv_heads=self._integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_eps=float(self.gguf.metadata["llama.attention.layer_norm_rms_epsilon"]),
        )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self.gguf.metadata.get(f"{ARCHITECTURE}.{key}", default)
        if not isinstance(value, int):
            raise UpscaleError(
                f"{self.path}: {ARCHITECTURE}.{key} is {value!r}, not an integer; "
                f"only models with identical layers can be upscaled"
            )
        return value


def write_upscaled(source: Source, out: Path, to: Shape, kind: str) -> None:
    """Write ``source`` upscaled to ``to``, with matrices of the type ``kind`` and vectors in F32.

    Keeps one tensor in memory at a time. Raises UpscaleError if the type does not fit the shape or
    the disk is too full, SpeculationError if it fills up while writing; a partial file is removed.
    """
    rng = np.random.default_rng(0)
    tensors = {
        name: _tensor(source, name, origin, to, TensorType[kind.upper()], rng)
        for name, origin in plans(list(source.gguf.tensors), source.shape.layers, to.layers)
    }
    try:
        needed = sum(n_bytes(tensor.shape, tensor.type) for tensor in tensors.values())
    except ValueError as error:
        raise UpscaleError(f"{kind} does not fit this model: {error}") from error
    free = shutil.disk_usage(out.absolute().parent).free
    if free < needed:
        raise UpscaleError(
            f"{out} needs {needed / 2**30:.1f} GiB, but its disk has {free / 2**30:.1f} GiB free; "
            f"choose smaller sizes, a smaller --type or another disk"
        )
    n_params = sum(math.prod(tensor.shape) for tensor in tensors.values())
    write_gguf(out, _metadata(source, to, kind, n_params), tensors)


def _tensor(
    source: Source,
    name: str,
    origin: str | None,
    to: Shape,
    matrix_type: TensorType,
    rng: np.random.Generator,
) -> NewTensor:
    """A tensor of the new model: matrices have the type ``matrix_type``, vectors F32."""
    kind = kind_of(name)
    found = None if origin is None else source.gguf.tensors[origin].shape
    expected = None if kind is None else kind.shape(source.shape, source.n_vocab)
    if None not in (found, expected) and found != expected:
        raise UpscaleError(
            f"{source.path}: {name} has the shape {found}, but by the metadata it should be "
            f"{expected}; this is not a plain Llama model"
        )
    shape = found if kind is None else kind.shape(to, source.n_vocab)
    assert shape is not None  # what is new has a kind
    written_as = matrix_type if len(shape) > 1 else TensorType.F32

    def data() -> Array:
        values = None if origin is None else source.gguf.tensor(origin)
        if kind is not None:
            values = upscaled_tensor(values, kind, shape, to.width / source.shape.width, rng)
        assert values is not None
        return encode(values, written_as)

    return NewTensor(shape, written_as, data)


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


# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.upscale",
        description="Write a wider and deeper copy of a Llama-architecture GGUF with the same "
        "logits, and so the same texts and accepted drafts, at the cost of its new size.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default=BUNDLED_MODEL, help="a GGUF file or a name in models.txt (%(default)s)")
    add("--width", type=int, help="of the hidden state, a multiple of the head size (unchanged)")
    add("--layers", type=int, help="number of layers (unchanged)")
    add("--type", choices=tuple(FILE_TYPES), default="f16", help="of the matrices (%(default)s)")
    add("--out", type=Path, required=True, metavar="FILE", help="GGUF file to write")
    flags = parser.parse_args(arguments)
    return run_command(lambda: _upscale(flags))


def _upscale(flags: argparse.Namespace) -> None:
    out = flags.out
    require_writable(out)
    path = resolve(flags.model)
    if out.exists() and out.samefile(path):
        raise UpscaleError(f"--out {out} is the model itself; give another path")
    source = Source(path)
    to, before = source.shape.upscaled(flags.width, flags.layers), source.shape
    write_upscaled(source, out, to, flags.type)
    print(
        f"{out}: function-preserving upscaling of {source.name}\n"
        f"width {before.width} -> {to.width}, layers {before.layers} -> {to.layers}, "
        f"hidden {before.hidden} -> {to.hidden}, heads {before.heads} -> {to.heads}, "
        f"{flags.type}, {out.stat().st_size / 2**20:,.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
