"""llama.cpp's compute devices, and which of them a model uses. Part of the ctypes edge.

Calls ggml functions that llama-cpp-python does not bind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batching.errors import InvalidParameter
from batching.llama import rpc
from batching.llama.library import exported
from batching.llama.log import initialise

_KINDS = ("cpu", "gpu", "integrated gpu", "accelerator")  # ggml_backend_dev_type


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
        function = exported("ggml_backend_dev_memory")
        function(ctypes.c_void_p(self.handle), ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def devices() -> list[Device]:
    """The devices llama.cpp can use; empty if this build does not list them."""
    initialise()
    count, get = exported("ggml_backend_dev_count"), exported("ggml_backend_dev_get")
    name, describe = exported("ggml_backend_dev_name"), exported("ggml_backend_dev_description")
    kind = exported("ggml_backend_dev_type")
    if None in (count, get, name, describe, kind):  # not exported by this build
        return []
    count.restype = ctypes.c_size_t
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    for function in (name, describe):
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    kind.argtypes = [ctypes.c_void_p]
    result = []
    for i in range(count()):
        handle = get(i)
        number = kind(handle)
        result.append(
            Device(
                _KINDS[number] if number < len(_KINDS) else "other",
                name(handle).decode("utf-8", "replace"),
                describe(handle).decode("utf-8", "replace"),
                handle,
            )
        )
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
    buffer_type = exported("ggml_backend_cpu_buffer_type")
    buffer_type.restype = ctypes.c_void_p
    layers = "|".join(map(str, range(n_layers)))
    pattern = rf"blk\.({layers})\.{tensors}".encode()
    return (_Override * 2)(_Override(pattern, buffer_type()))  # the second, empty one ends them


ANYWHERE = Placement()
