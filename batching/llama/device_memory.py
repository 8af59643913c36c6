"""What of a model the memory of the devices holds, known before llama.cpp tries.

An allocation that fails may take seconds, end the process, or, with some drivers, move to main
memory and make everything slow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import OutOfMemory
from batching.gguf.reader import GGUFFile
from batching.gguf.types import TYPES
from batching.llama.context_params import KV_TYPES
from batching.llama.devices import Device, Placement, joined

# Left free for what a step computes with, and for a draft model or heads: an eighth, at most this.
_MARGIN = 2**30
KV_BYTES = {name: TYPES[kind].n_bytes / TYPES[kind].n_values for name, kind in KV_TYPES.items()}
# As llama.cpp's own --cpu-moe takes them; a shared expert is none of them.
EXPERTS = r"ffn_(?:up|down|gate|gate_up)_(?:ch|)exps"
_LAYER = re.compile(rf"blk\.(\d+)\.({EXPERTS})?")
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"
Sizes = npt.NDArray[Any]  # bytes


class CacheSize(NamedTuple):
    """Size of a KV cache: its cells, and the type of its values."""

    n_ctx: int
    kv_type: str

    def n_bytes(self, n_values: int) -> float:
        """``n_values``: keys and values of a token."""
        return self.n_ctx * n_values * KV_BYTES[self.kv_type]


class Offload(NamedTuple):
    """What of a model goes to its devices.

    n_gpu_layers  its last layers, of which the output matrix counts as one; None = all
    n_cpu_moe     its first layers, whose experts stay in main memory even so
    split         how many of the layers each device gets; empty = in proportion to its free memory
    """

    n_gpu_layers: int | None
    n_cpu_moe: int = 0
    split: tuple[int, ...] = ()


def free_memory(devices: Sequence[Device]) -> int | None:
    """Free bytes of all devices together; None if one of them does not tell."""
    found = [device.memory for device in devices]
    return sum([free for free, _ in found]) if all(total for _, total in found) else None


def choose_layers(
    files: Sequence[GGUFFile],
    devices: Sequence[Device],
    wanted: Placement,
    cache: CacheSize | None,
) -> Offload:
    """What of a model goes to its devices: what ``wanted`` asks for, and of what it leaves open as
    much as fits together with its part of ``cache``. Experts stay in main memory first, since a
    token needs few of them, and then whole layers.

    Raises OutOfMemory if the weights asked for do not fit.
    """
    rest, experts = layer_bytes(files)
    n_layer, asked = len(rest) - 1, wanted.n_gpu_layers
    with_experts = n_layer if experts.any() else 0
    least = min(wanted.n_cpu_moe or 0, with_experts)
    most = with_experts if wanted.n_cpu_moe is None else least
    total = free_memory(devices) if devices else None
    if total is None:
        return Offload(asked, least)
    values = [*kv_values(files[0]), 0]
    cached = np.array([cache.n_bytes(n) if cache else 0.0 for n in values])
    free = np.array([device.memory[0] for device in devices])
    room = free - np.minimum(_MARGIN, free // 8)

    def weights(n_gpu_layers: int, n_cpu_moe: int) -> Sizes:
        moved = np.arange(n_layer + 1) < n_cpu_moe
        return (rest + np.where(moved, 0, experts))[n_layer + 1 - n_gpu_layers :]

    n_all = n_layer + 1 if asked is None or asked < 0 else min(asked, n_layer + 1)
    choices = [(n_all, n) for n in range(least, most + 1)]
    choices += [(n, most) for n in reversed(range(n_all))]
    for n_gpu_layers, n_cpu_moe in choices:
        sizes = weights(n_gpu_layers, n_cpu_moe) + cached[n_layer + 1 - n_gpu_layers :]
        split, parts = _divided(sizes, free)
        # For a large batch, a device gets a copy of one matrix of all experts of a layer.
        if (parts + (experts.max() * 2 / 3 if n_cpu_moe else 0) <= room).all():
            break
    if n_gpu_layers == n_all or asked is None:
        return Offload(n_gpu_layers, n_cpu_moe, split)
    needed = int(weights(n_all, most).sum())
    if needed > total:
        raise OutOfMemory(
            f"{asked} layers of {files[0].path} need {needed / 2**30:,.1f} GiB, but "
            f"{joined(devices)} has {total / 2**30:,.1f} GiB free; lower {{n_gpu_layers}} to "
            f"{n_gpu_layers}, or leave it out",
            settings=("n_gpu_layers",),
            requested=needed,
            available=total,
        )
    return Offload(n_all, most)


def layer_bytes(files: Sequence[GGUFFile]) -> tuple[Sizes, Sizes]:
    """Bytes of each layer's weights, then of the output matrix: (n_layer + 1,) without experts, and
    (n_layer + 1,) of its experts."""
    n_layer = files[0].number(f"{_architecture(files[0])}.block_count")
    rest, experts = np.zeros(n_layer + 1), np.zeros(n_layer + 1)
    sizes = {
        name: file.n_bytes(name)
        for file in files
        for name, tensor in file.tensors.items()
        if tensor.type in TYPES
    }
    for name, size in sizes.items():
        layer = _LAYER.match(name)
        if layer is not None:
            (experts if layer[2] else rest)[min(int(layer[1]), n_layer)] += size
        elif name.startswith("output"):
            rest[-1] += size
    if _OUTPUT not in sizes:  # the embeddings, of which the device gets a copy
        rest[-1] += sizes.get(_EMBEDDINGS, 0)
    return rest, experts


def kv_values(file: GGUFFile) -> list[int]:
    """Keys and values of a token in the cache of each layer, at most."""
    heads = per_layer(file, "attention.head_count")
    n_embd = file.number(f"{_architecture(file)}.embedding_length")
    usual = n_embd // max(1, *heads) if heads else 0
    kinds = [per_layer(file, f"attention.{kind}_length", usual) for kind in ("key", "value")]
    kv_heads = per_layer(file, "attention.head_count_kv", heads)
    return [n * (key + value) for n, key, value in zip(kv_heads, *kinds, strict=True)]


def per_layer(file: GGUFFile, key: str, default: Any = 0) -> list[int]:
    """A value of the model that a header gives once or for each layer."""
    value = file.metadata.get(f"{_architecture(file)}.{key}", default)
    n_layer = file.number(f"{_architecture(file)}.block_count")
    values = value if isinstance(value, list) else n_layer * [value]
    return [one if isinstance(one, int) else 0 for one in (values + n_layer * [0])[:n_layer]]


def _architecture(file: GGUFFile) -> Any:
    return file.metadata.get("general.architecture", "")


def _divided(sizes: Sizes, free: npt.NDArray[np.int64]) -> tuple[tuple[int, ...], Sizes]:
    """Consecutive layers for each device, of sizes in proportion to its free memory: how many, and
    their bytes, (n_devices,)."""
    ends = np.cumsum(free) * (sizes.sum() / max(1, free.sum()))
    owners = np.searchsorted(ends, np.cumsum(sizes) - sizes / 2).clip(max=len(free) - 1)
    counts = np.bincount(owners, minlength=len(free)).tolist()
    return tuple(counts), np.bincount(owners, sizes, len(free))
