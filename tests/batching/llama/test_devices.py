"""Devices and cores, as systems report them, and what is put on devices or chosen for them."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter, OutOfMemory
from batching.gguf.reader import GGUFFile
from batching.llama import hardware, library
from batching.llama.devices import (
    CacheSize,
    Device,
    Offload,
    Placement,
    choose_layers,
    devices,
    layer_bytes,
)
from batching.llama.hardware import choose_cuda_graphs, physical_cores
from batching.llama.library import exported, library_folder
from batching.llama.log import recent_log
from batching.llama.model import Model
from batching.llama.private_api import _look_up
from tests.support.tiny_gguf import write_tiny_gguf


class Library(dict[str, Any]):
    """A library of these functions; a missing one raises AttributeError, as in ctypes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __missing__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """llama.cpp's library as on Windows: without the symbols of the libraries it links to."""
    folder = library_folder()
    found = Library(str(folder / "llama"))
    monkeypatch.setattr("llama_cpp.llama_cpp._lib", found)
    monkeypatch.setattr(library, "_LINKED", [path.name for path in folder.glob("*ggml*")])
    exported.cache_clear()
    yield found
    exported.cache_clear()


def test_functions_are_found_in_ggmls_own_libraries_by_mangled_names(
    alone: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exported("ggml_type_name")(1) != 0
    assert any(device.kind == "cpu" for device in devices())

    def function() -> None: ...

    for found in ("_Z9llama_xyzP13llama_contextj", "?llama_xyz@@YAXPEAUllama_context@@I@Z"):
        alone[found] = function
        assert _look_up("llama_xyz", "j", "I", None) is function
        del alone[found]
        exported.cache_clear()
    assert _look_up("llama_xyz", "j", "I", None) is None
    monkeypatch.setattr(library, "_LINKED", [])
    assert devices() == []


@pytest.mark.parametrize(
    ("known", "cores"),
    [
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, 4),  # Apple: the performance cores
        ({"hw.physicalcpu": 6}, 6),  # Intel
        ({}, 5),  # half of the logical cores
    ],
)
def test_physical_cores_are_counted_on_macos(
    known: dict[str, int], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(hardware, "_sysctl", lambda name: known.get(name, 0))
    assert physical_cores() == cores


def test_physical_cores_are_counted_from_windows_records_of_different_lengths() -> None:
    cores = [struct.pack("<II", 0, size) + bytes(size - 8) for size in (48, 48, 64)]
    assert hardware._count_records(b"".join(cores)) == 3
    assert hardware._count_records(b"") == 0


@pytest.mark.parametrize(
    ("n_gpu_layers", "n_host"), [(None, 0), (-1, 0), (0, 2), (1, 2), (2, 1), (3, 0)]
)
def test_the_output_matrix_goes_to_the_gpu_before_any_layer(
    n_gpu_layers: int | None, n_host: int, tiny_model: Path
) -> None:
    with Model(tiny_model, placement=Placement(n_gpu_layers)) as model:
        assert (model.n_layer, model.n_host_layers) == (2, 2)
        model.devices = [Device("gpu", "CUDA0", "a GPU", 0)]
        assert model.n_host_layers == n_host


class Fake:
    """A device with memory: free bytes, all bytes."""

    name = "CUDA0"

    def __init__(self, free: int, total: int = 2**40) -> None:
        self.memory = free, total


def with_room(n_bytes: int) -> Fake:
    """A device with so much room for layers: an eighth of it stays free."""
    return Fake(next(free for free in range(n_bytes, 2 * n_bytes) if free - free // 8 == n_bytes))


def chosen(files: Any, *devices: Any, n: int | None = None, cache: CacheSize | None = None) -> Any:
    return choose_layers(files, devices, Placement(n), cache).n_gpu_layers


def test_as_many_layers_go_to_the_devices_as_fit_with_their_cache(tmp_path: Path) -> None:
    files = [GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", n_layer=4))]
    layer = sum(files[0].n_bytes(name) for name in files[0].tensors if name.startswith("blk.0."))
    last = files[0].n_bytes("output.weight") + files[0].n_bytes("output_norm.weight")
    assert chosen(files, with_room(last + 2 * layer)) == 3
    assert chosen(files, with_room(last + 2 * layer - 1)) == 2
    assert chosen(files, with_room(2 * layer), with_room(last + 2 * layer)) == 5
    assert chosen(files, with_room(2 * layer), with_room(last + 2 * layer - 1)) == 4
    assert chosen(files, with_room(last - 1)) == 0
    assert chosen(files, with_room(last + 4 * layer)) == 5
    # 32 wide, so keys and values of a token take 64 values of 4 bytes in each layer.
    cache = CacheSize(1000, "f32")
    assert chosen(files, with_room(last + 3 * layer + 2 * 256_000), cache=cache) == 3
    assert chosen(files, with_room(last + 3 * layer + 3 * 256_000), cache=cache) == 4
    # Nothing is known of this machine's, and without devices there is nothing to choose.
    assert chosen(files, Fake(0, 0)) is None
    assert chosen(files) is None
    assert chosen(files, n=3) == 3
    assert chosen(files, Fake(100 * layer), n=2) == 2
    assert chosen(files, Fake(last + layer), n=2) == 2  # more than what should stay free
    fits = "4 layers of .*but CUDA0 has 0.0 GiB free; lower n_gpu_layers to 1, or leave it out"
    with pytest.raises(OutOfMemory, match=fits) as caught:
        chosen(files, Fake(2 * layer), n=4)
    assert caught.value.available == 2 * layer


def test_experts_stay_in_main_memory_before_any_layer_does(tmp_path: Path) -> None:
    files = [GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", n_layer=4, n_expert=4))]
    rest, experts = (int(one[0]) for one in layer_bytes(files))
    assert experts == 4 * 3 * 32 * 64 * 4  # four of three F32 matrices
    last = sum(files[0].n_bytes(name) for name in files[0].tensors if name.startswith("output"))
    layers, copied = last + 4 * rest, 2 * experts // 3

    def placed(room: int, cache: CacheSize | None = None, **wanted: int) -> tuple[int | None, int]:
        found: Any = choose_layers(files, [with_room(room)], Placement(**wanted), cache)  # type: ignore
        return found.n_gpu_layers, found.n_cpu_moe

    assert placed(layers + 4 * experts) == (5, 0)
    # With experts in main memory, the device has room for a copy of a part of them.
    assert placed(layers + 4 * experts - 1) == (5, 1)
    assert placed(layers + 3 * experts + copied - 1) == (5, 2)
    # 100 tokens take 25,600 bytes in each layer, together a little more than a layer's experts.
    assert placed(layers + 4 * experts, CacheSize(100, "f32")) == (5, 2)
    assert placed(layers + copied) == (5, 4)
    assert placed(layers + copied - 1) == (4, 4)
    assert placed(last + rest + copied) == (2, 4)
    # What is asked for is kept, and the rest fitted to it.
    assert placed(layers + 4 * experts, n_cpu_moe=3) == (5, 3)
    assert placed(layers + 4 * experts, n_cpu_moe=999) == (5, 4)
    two = last + 2 * (rest + experts)
    assert placed(two + copied, n_cpu_moe=1) == (3, 1)
    assert placed(two, n_gpu_layers=3) == (3, 0)
    assert placed(two - 1, n_gpu_layers=3) == (3, 3)
    with pytest.raises(OutOfMemory, match="4 layers .*; lower n_gpu_layers to 1, or leave it out"):
        placed(last + experts, n_gpu_layers=4, n_cpu_moe=0)


def test_several_devices_share_layers_and_experts_by_bytes(tmp_path: Path) -> None:
    files = [GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", n_layer=8, n_expert=16))]
    both = 2 * [with_room(int(3.5 * layer_bytes(files)[1][0]))]
    # Halves of the layers would leave all experts to the second device.
    found = choose_layers(files, both, Placement(), None)  # type: ignore[arg-type]
    assert found == Offload(9, 4, (6, 3))


def test_llama_cpp_keeps_the_experts_of_the_first_layers_in_main_memory(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", n_layer=3, n_expert=4)
    moved = {}
    for n in (None, 0, 2, 999):
        with Model(path, placement=Placement(n_cpu_moe=n)) as model:
            lines = [line for line in recent_log().splitlines() if "overridden to CPU" in line]
            moved[n] = model.n_cpu_moe, {line.split()[1] for line in lines}
    names = {f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    first, second, third = ({f"blk.{i}.{name}" for name in names} for i in range(3))
    assert moved == {
        None: (0, set()),
        0: (0, set()),
        2: (2, first | second),
        999: (3, first | second | third),
    }


@pytest.mark.parametrize(
    ("wanted", "n_bytes", "disabled"),
    [
        ("", 144_000_000, None),
        ("", 1_900_000_000, "1"),
        ("on", 1_900_000_000, None),
        ("off", 144_000_000, "1"),
    ],
)
def test_cuda_graphs_are_off_for_a_large_model_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, wanted: str, n_bytes: int, disabled: str | None
) -> None:
    monkeypatch.setenv("SPECULATION_CUDA_GRAPHS", wanted)
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "")  # so that it is restored
    monkeypatch.delenv("GGML_CUDA_DISABLE_GRAPHS")
    choose_cuda_graphs(n_bytes)
    assert os.environ.get("GGML_CUDA_DISABLE_GRAPHS") == disabled
    monkeypatch.setenv("SPECULATION_CUDA_GRAPHS", "yes")
    with pytest.raises(InvalidParameter, match="'yes'; set it to on or off"):
        choose_cuda_graphs(n_bytes)
