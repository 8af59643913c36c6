"""Reading the source's GGUF and writing the enlarged one, a tensor at a time.

The package ``gguf`` is needed here alone, and imported where it is used: the rest of the program
does without it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.upscale.shape import BLOCK, EnlargeError, Shape
from tools.upscale.tensors import VOCAB, Floats, Plan, grown, new_shape, plans

ARCHITECTURE = "llama"
# name -> member of GGMLQuantizationType and of LlamaFileType; what the gguf package can write
TYPES = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}
_WRITTEN_ANEW = {
    "general.architecture",
    "general.name",
    "general.description",
    "general.size_label",  # it would claim a size class
    "general.file_type",
    "general.quantization_version",
}


def gguf_package() -> Any:
    """The module ``gguf``. Raises EnlargeError with the way to get it."""
    try:
        import gguf
    except ImportError as error:
        raise EnlargeError(
            f"enlarging a model needs the package gguf ({error}); "
            f"install it with: python -m pip install 'gguf>=0.17'"
        ) from None
    return gguf


class Source:
    """A Llama-architecture GGUF, mapped into memory: its shape, metadata and tensors.

    Raises EnlargeError for a file that is no GGUF, of another architecture, or without its sizes.
    """

    def __init__(self, path: Path) -> None:
        self.gguf = gguf_package()
        self.path = path
        try:
            self.reader = self.gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise EnlargeError(
                f"{path} is no complete GGUF file ({error}); give one that llama.cpp loads"
            ) from error
        architecture = self.value("general.architecture")
        if architecture != ARCHITECTURE:
            raise EnlargeError(
                f"{path} has the architecture {architecture!r}; only {ARCHITECTURE!r} can be "
                f"enlarged with its function kept"
            )
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.name = str(self.value("general.name") or path.stem)
        self.shape = self._read_shape()
        self.n_vocab = self._n_vocab()

    def value(self, key: str) -> Any:
        """A metadata value, or None."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def values_of(self, name: str) -> Floats:
        """A tensor as float32, ``(rows, columns)`` or ``(n,)``."""
        tensor = self.tensors[name]
        try:
            values = self.gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise EnlargeError(
                f"{self.path}: {name} has the type {tensor.tensor_type.name}, which the package "
                f"gguf cannot read; enlarge an F16 or Q8_0 version of the model"
            ) from error
        return np.asarray(values, np.float32)

    def _n_vocab(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise EnlargeError(
                f"{self.path} has no token_embd.weight: it holds no whole model; give one that does"
            )
        return int(embedding.shape[1])

    def _read_shape(self) -> Shape:
        width = self._whole("embedding_length")
        heads = self._whole("attention.head_count")
        head_dim = int(self.value(f"{ARCHITECTURE}.attention.key_length") or width // heads)
        value_dim = int(self.value(f"{ARCHITECTURE}.attention.value_length") or head_dim)
        if value_dim != head_dim:
            raise EnlargeError(
                f"{self.path}: keys have {head_dim} values a head and values {value_dim}; "
                f"only models where they are alike can be enlarged"
            )
        kv_heads = self.value(f"{ARCHITECTURE}.attention.head_count_kv")
        return Shape(
            width=width,
            layers=self._whole("block_count"),
            hidden=self._whole("feed_forward_length"),
            heads=heads,
            kv_heads=heads if kv_heads is None else self._whole("attention.head_count_kv"),
            head_dim=head_dim,
            norm_eps=float(self.value(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon") or 0),
        )

    def _whole(self, key: str) -> int:
        value = self.value(f"{ARCHITECTURE}.{key}")
        if not isinstance(value, int):
            raise EnlargeError(
                f"{self.path}: {ARCHITECTURE}.{key} is {value!r}, not one whole number; "
                f"only models whose layers are all alike can be enlarged"
            )
        return value


def write_enlarged(
    source: Source,
    out: Path,
    to: Shape,
    kind: str,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write ``source`` enlarged to ``to``, matrices in the type ``kind``, vectors in F32.

    One tensor is in memory at a time. ``progress(bytes_done, bytes_total)`` is called after each.
    Raises EnlargeError when the type does not suit the shape or the disk has no room; a file that
    was begun is removed.
    """
    gguf = source.gguf
    type_name, file_type = TYPES[kind]
    quantization = gguf.GGMLQuantizationType[type_name]
    if gguf.GGML_QUANT_SIZES[quantization][0] == BLOCK:
        for sizes in (source.shape, to):
            sizes.check_blocks(kind)
    tensors = [
        _planned(source, plan, to, quantization)
        for plan in plans(list(source.tensors), source.shape.layers, to.layers)
    ]
    n_total = sum(n_bytes for _, _, _, n_bytes in tensors)
    _check_room(out, n_total)
    partial = out.with_name(f"{out.name}.partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    try:
        n_params = sum(math.prod(shape) for _, shape, _, _ in tensors)
        _add_metadata(writer, source, to, gguf.LlamaFileType[file_type], n_params)
        for plan, shape, written_as, n_bytes in tensors:
            writer.add_tensor_info(plan.name, shape, np.dtype(np.float32), n_bytes, written_as)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(seed)
        widening = to.width / source.shape.width
        n_done = 0
        for plan, shape, written_as, n_bytes in tensors:
            values = source.values_of(plan.name) if plan.source else None
            if plan.kind is not None:
                values = grown(values, plan.kind, shape, widening, rng)
            writer.write_tensor_data(gguf.quants.quantize(values, written_as))
            n_done += n_bytes
            if progress is not None:
                progress(n_done, n_total)
        writer.close()
        partial.replace(out)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _planned(
    source: Source, plan: Plan, to: Shape, quantization: Any
) -> tuple[Plan, tuple[int, ...], Any, int]:
    """A tensor with its new shape (rows first), its type and its bytes in the file."""
    if plan.kind is None:
        shape = tuple(int(n) for n in reversed(source.tensors[plan.name].shape))
    else:
        shape = new_shape(plan.kind, to, source.n_vocab)
        if plan.source:
            _check_size(source, plan)
    written_as = quantization if len(shape) > 1 else source.gguf.GGMLQuantizationType.F32
    block, block_bytes = source.gguf.GGML_QUANT_SIZES[written_as]
    return plan, shape, written_as, math.prod(shape) // block * block_bytes


def _check_size(source: Source, plan: Plan) -> None:
    """A tensor that is not of the size that the metadata say would be put into the wrong place."""
    assert plan.kind is not None
    found = tuple(int(n) for n in reversed(source.tensors[plan.name].shape))
    expected = tuple(
        source.n_vocab if axis == VOCAB else source.shape.size(axis) for axis in plan.kind.axes
    )
    if found != expected:
        raise EnlargeError(
            f"{source.path}: {plan.name} is {found} and its metadata say {expected}; "
            f"this is no plain Llama model"
        )


def _check_room(out: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < n_bytes:
        raise EnlargeError(
            f"{out} takes {n_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free there; "
            f"choose smaller sizes, a smaller --type or another disk"
        )


def _add_metadata(writer: Any, source: Source, to: Shape, file_type: Any, n_params: int) -> None:
    """The source's metadata with the new sizes, and a name that says what this is."""
    before = source.shape
    writer.add_name(f"function-preserving enlargement of {source.name}")
    writer.add_description(
        f"Function-preserving enlargement of {source.name}: the same logits at the cost of "
        f"{n_params / 1e6:,.0f}M parameters, for measuring speed. It is no larger model. "
        f"Width {before.width} -> {to.width}, layers {before.layers} -> {to.layers}, "
        f"hidden {before.hidden} -> {to.hidden}."
    )
    writer.add_file_type(file_type)
    writer.add_quantization_version(source.gguf.GGML_QUANT_VERSION)
    writer.add_embedding_length(to.width)
    writer.add_block_count(to.layers)
    writer.add_feed_forward_length(to.hidden)
    writer.add_head_count(to.heads)
    writer.add_head_count_kv(to.kv_heads)
    writer.add_layer_norm_rms_eps(to.norm_eps)
    written = {*_WRITTEN_ANEW, *writer.kv_data[0]}
    array = source.gguf.GGUFValueType.ARRAY
    for field in source.reader.fields.values():
        if field.name in written or field.name.startswith(("GGUF.", "split.")):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == array else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
