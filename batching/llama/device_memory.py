"""How many layers the memory of the devices holds, known before llama.cpp tries.

An allocation that fails may take seconds, end the process, or, with some drivers, move to main
memory and make everything slow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from batching.errors import OutOfMemory
from batching.gguf.reader import GGUFFile
from batching.gguf.types import TYPES
from batching.llama.devices import Device, joined

# Left free for what a step computes with, and for a draft model or heads: an eighth, at most this.
_MARGIN = 2**30
KV_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}  # per value; q8_0 has a scale per 32 values
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


class CacheSize(NamedTuple):
    """Size of a KV cache: its cells, 0 = the model's own number, and the type of its values."""

    n_ctx: int
    kv_type: str

    def bytes_per_layer(self, n_values: int) -> float:
        """``n_values``: keys and values of a token in one layer."""
        return self.n_ctx * n_values * KV_BYTES[self.kv_type]


def free_memory(devices: Sequence[Device]) -> int | None:
    """Free bytes of all devices together; None if one of them does not tell."""
    found = [device.memory for device in devices]
    return sum([free for free, _ in found]) if all(total for _, total in found) else None


def choose_layers(
    files: Sequence[GGUFFile],
    devices: Sequence[Device],
    n_gpu_layers: int | None,
    cache: CacheSize | None,
) -> int | None:
    """How many of a model's layers go to its devices; the output matrix counts as the last.

    All that are asked for; with None as many as fit together with their part of ``cache``, or all
    (None) if nothing is known. Raises OutOfMemory if the weights asked for do not fit.
    """
    free = free_memory(devices) if devices else None
    if free is None:
        return n_gpu_layers
    sizes = _layer_bytes(files)
    room = free - min(_MARGIN, free // 8)
    if n_gpu_layers is None:
        per_layer = 0.0 if cache is None else _cache_bytes(files[0], cache)
        n = _n_fitting([*(size + per_layer for size in sizes[:-1]), sizes[-1]], room)
        return None if n == len(sizes) else n
    needed = sum(sizes[len(sizes) - n_gpu_layers :] if n_gpu_layers < len(sizes) else sizes)
    if n_gpu_layers and needed > free:
        raise OutOfMemory(
            f"{n_gpu_layers} layers of {files[0].path} need {needed / 2**30:,.1f} GiB, but "
            f"{joined(devices)} has {free / 2**30:,.1f} GiB free; lower {{n_gpu_layers}} to "
            f"{_n_fitting(sizes, room)}, or leave it out",
            settings=("n_gpu_layers",),
            requested=needed,
            available=free,
        )
    return n_gpu_layers


def _layer_bytes(files: Sequence[GGUFFile]) -> list[int]:
    """Bytes of each layer's weights, then of the output matrix."""
    n_layer = files[0].number(f"{files[0].metadata.get('general.architecture')}.block_count")
    found = [0] * (n_layer + 1)
    sizes = {
        name: file.n_bytes(name)
        for file in files
        for name, tensor in file.tensors.items()
        if tensor.type in TYPES
    }
    for name, size in sizes.items():
        layer = _LAYER.match(name)
        if layer is not None:
            found[min(int(layer[1]), n_layer)] += size
        elif name.startswith("output"):
            found[-1] += size
    if _OUTPUT not in sizes:  # the embeddings, of which the device gets a copy
        found[-1] += sizes.get(_EMBEDDINGS, 0)
    return found


def _cache_bytes(file: GGUFFile, cache: CacheSize) -> float:
    """Bytes of one layer's KV cache, at most."""
    architecture = file.metadata.get("general.architecture")
    n_head = file.number(f"{architecture}.attention.head_count", 1)
    n_head_kv = file.number(f"{architecture}.attention.head_count_kv", n_head)
    usual = file.number(f"{architecture}.embedding_length") // max(1, n_head)
    n_values = n_head_kv * sum(
        [file.number(f"{architecture}.attention.{kind}_length", usual) for kind in ("key", "value")]
    )
    n_ctx = cache.n_ctx or file.number(f"{architecture}.context_length")
    return cache._replace(n_ctx=n_ctx).bytes_per_layer(n_values)


def _n_fitting(sizes: Sequence[float], free: float) -> int:
    """How many layers fit, from the last."""
    for n, size in enumerate(reversed(sizes)):
        free -= size
        if free < 0:
            return n
    return len(sizes)
