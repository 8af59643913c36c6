"""llama.cpp's compute devices, and what of a model they get. Part of the ctypes edge.

Calls ggml functions that llama-cpp-python does not bind. What the memory of the devices holds is
known before llama.cpp tries: an allocation that fails may take seconds, end the process, or, with
some drivers, move to main memory and make everything slow.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter, OutOfMemory
from batching.gguf.reader import GGUFFile
from batching.gguf.types import TYPES
from batching.llama import rpc
from batching.llama.context_params import KV_TYPES
from batching.llama.library import declared
from batching.llama.log import initialise

_KINDS = ("cpu", "gpu", "integrated gpu", "accelerator")  # ggml_backend_dev_type
# Left free for what a step computes with, and for a draft model or heads: an eighth, at most this.
_MARGIN = 2**30
KV_BYTES = {name: TYPES[kind].n_bytes / TYPES[kind].n_values for name, kind in KV_TYPES.items()}
# As llama.cpp's own --cpu-moe takes them; a shared expert is none of them.
EXPERTS = r"ffn_(?:up|down|gate|gate_up)_(?:ch|)exps"
_LAYER = re.compile(rf"blk\.(\d+)\.({EXPERTS})?")
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"
Sizes = npt.NDArray[Any]  # bytes


@dataclass(frozen=True)
class Device:
    """A compute device.

    kind         cpu, gpu, integrated gpu, accelerator or other
    name         llama.cpp's, such as ``CUDA0``, or ``RPC0`` of a worker
    description  its maker's name, or the worker's address
    handle       the ``ggml_backend_dev_t``
    """

    kind: str
    name: str
    description: str
    handle: int = field(repr=False, compare=False)

    @property
    def is_gpu(self) -> bool:
        """Whether layers are offloaded to it; llama.cpp takes the devices of workers for GPUs."""
        return self.kind in ("gpu", "integrated gpu")

    @property
    def is_remote(self) -> bool:
        return self.name.startswith("RPC")

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all of them."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        size = ctypes.POINTER(ctypes.c_size_t)
        memory = declared("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
        memory(self.handle, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def devices() -> list[Device]:
    """The devices llama.cpp can use; empty if this build does not list them."""
    initialise()
    count = declared("ggml_backend_dev_count", ctypes.c_size_t)
    get = declared("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name, describe = (
        declared(f"ggml_backend_dev_{what}", ctypes.c_char_p, ctypes.c_void_p)
        for what in ("name", "description")
    )
    kind = declared("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    if None in (count, get, name, describe, kind):  # not exported by this build
        return []
    result = []
    for handle in map(get, range(count())):
        called, described = (ask(handle).decode("utf-8", "replace") for ask in (name, describe))
        of_kind = dict(enumerate(_KINDS)).get(kind(handle), "other")
        result.append(Device(of_kind, called, described, handle))
    return result


def gpus() -> list[Device]:
    """The GPUs of this machine that llama.cpp uses: integrated ones if there are no others."""
    found = [device for device in devices() if device.is_gpu and not device.is_remote]
    return [device for device in found if device.kind == "gpu"] or found


def joined(devices: Sequence[Device]) -> str:
    """The names of devices, for people."""
    return " and ".join(device.name for device in devices)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(given.split(",") if isinstance(given, str) else given) if given else ()


@dataclass(frozen=True)
class Placement:
    """Where a model is computed.

    n_gpu_layers  how many of its layers are on the devices, from the last; None = all that fit
    n_cpu_moe     how many of its first layers have their experts in main memory even so; None = as
                  many as do not fit
    devices       names of the devices, in order; None = all GPUs; empty = the CPU alone
    workers       addresses of RPC workers, HOST:PORT, whose devices come before this machine's
    """

    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    devices: tuple[str, ...] | None = None
    workers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        n_gpu_layers: int | None = None,
        n_cpu_moe: int | None = None,
        device: str | Sequence[str] | None = None,
        rpc: str | Sequence[str] = (),
    ) -> Placement:
        """From settings, in which names may also be joined by commas; device ``none`` is none."""
        names = None if device is None else _names(device)
        return cls(n_gpu_layers, n_cpu_moe, () if names == ("none",) else names, _names(rpc))

    @property
    def local(self) -> Placement:
        """The same on this machine alone."""
        names = self.devices
        if names is not None:
            names = tuple(name for name in names if not name.startswith("RPC"))
        return replace(self, devices=names, workers=())

    def chosen(self) -> list[Device]:
        """The devices, in order; the workers are connected.

        Raises InvalidParameter for a device that is not there, ModelError for such a worker.
        """
        rpc.connect(self.workers)
        known = [
            device
            for device in devices()
            if not device.is_remote or device.description in self.workers
        ]
        if self.devices is None:
            return [device for device in known if device.is_remote] + gpus()
        by_name = {device.name: device for device in known if device.is_gpu}
        for name in self.devices:
            if name not in by_name:
                raise InvalidParameter(
                    f"there is no device {name}; {{device}} can be none"
                    + "".join(f", {one.name} ({one.description})" for one in by_name.values()),
                    settings=("device",),
                )
        return [by_name[name] for name in self.devices]

    def native(self, chosen: Sequence[Device]) -> Any:
        """``chosen`` as llama.cpp takes them: an array that ends with a null pointer. None lets
        llama.cpp choose, which would also take the workers of other models."""
        if self.devices is None and not rpc.is_connected():
            return None
        return (ctypes.c_void_p * (len(chosen) + 1))(*[device.handle for device in chosen], None)


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override: where the tensors that match a pattern go."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def in_main_memory(tensors: str, n_layers: int) -> Any:
    """Overrides, as llama.cpp takes them, that keep ``tensors``, a pattern, of the first layers in
    main memory; None if of none."""
    if not n_layers:
        return None
    buffer_type = declared("ggml_backend_cpu_buffer_type", ctypes.c_void_p)
    layers = "|".join(map(str, range(n_layers)))
    pattern = rf"blk\.({layers})\.{tensors}".encode()
    return (_Override * 2)(_Override(pattern, buffer_type()))  # the second, empty one ends them


ANYWHERE = Placement()


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
