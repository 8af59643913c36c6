"""Devices and cores, as other operating systems report them."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batching.llama import hardware, library
from batching.llama.devices import Device, Placement, devices
from batching.llama.hardware import physical_cores
from batching.llama.library import exported, library_folder
from batching.llama.model import Model
from batching.llama.private_api import _look_up


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


def test_ggml_functions_are_found_in_its_own_libraries(alone: Library) -> None:
    assert exported("ggml_type_name")(1) != 0
    assert any(device.kind == "cpu" for device in devices())


def test_without_the_ggml_libraries_no_devices_are_listed(
    alone: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_LINKED", [])
    assert devices() == []


def test_cpp_functions_are_found_by_either_compilers_mangled_names(alone: Library) -> None:
    def function() -> None: ...

    name = "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z"
    alone[name] = function
    assert _look_up([], None, "llama_get_embeddings_layer_inp", name) is function


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
