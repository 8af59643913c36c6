"""What the machine offers, as other systems than the one at hand tell it."""

from __future__ import annotations

import atexit
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from batching.llama import hardware, library
from batching.llama.context import Context
from batching.llama.hardware import devices, physical_cores
from batching.llama.library import exported, library_folder
from batching.llama.model import Model
from batching.llama.private_api import internal
from tests.support.exact import EXACT


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """llama.cpp's library as Windows shows it: without what it is linked with."""
    folder = library_folder()
    found = SimpleNamespace(_name=str(folder / "llama"))
    monkeypatch.setattr("llama_cpp.llama_cpp._lib", found)
    monkeypatch.setattr(library, "_LINKED", [path.name for path in folder.glob("*ggml*")])
    exported.cache_clear()
    yield found
    exported.cache_clear()


def test_functions_of_ggml_are_found_in_its_own_libraries(alone: SimpleNamespace) -> None:
    assert exported("ggml_type_name")(1) != 0
    assert any(device.kind == "cpu" for device in devices())


def test_a_library_that_does_not_tell_its_devices_has_none_to_show(
    alone: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_LINKED", [])
    assert devices() == []


def test_functions_of_cpp_are_found_by_the_names_of_either_compiler(alone: SimpleNamespace) -> None:
    def function() -> None: ...

    name = "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z"
    setattr(alone, name, function)
    internal.cache_clear()
    assert internal("llama_get_embeddings_layer_inp") is function
    internal.cache_clear()


@pytest.mark.parametrize(
    ("known", "cores"),
    [
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, 4),  # Apple's: the fast ones
        ({"hw.physicalcpu": 6}, 6),  # Intel's
        ({}, 5),  # half of what there is
    ],
)
def test_cores_are_those_that_macos_counts(
    known: dict[str, int], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(hardware, "_sysctl", lambda name: known.get(name, 0))
    assert physical_cores() == cores


def test_cores_of_windows_are_records_of_their_own_lengths() -> None:
    cores = [struct.pack("<II", 0, size) + bytes(size - 8) for size in (48, 48, 64)]
    assert hardware._count_records(b"".join(cores)) == 3
    assert hardware._count_records(b"") == 0


@pytest.mark.parametrize(
    ("n_gpu_layers", "n_host"), [(None, 0), (-1, 0), (0, 2), (1, 2), (2, 1), (3, 0)]
)
def test_the_output_matrix_goes_to_the_gpu_before_any_layer(
    n_gpu_layers: int | None, n_host: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(tiny_model, n_gpu_layers=n_gpu_layers) as model:
        assert (model.n_layer, model.n_host_layers) == (2, 2)
        monkeypatch.setattr("batching.llama.model.supports_gpu", lambda: True)
        assert model.n_host_layers == n_host


def test_what_is_left_open_is_freed_at_the_end_of_the_program_the_context_first(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_do: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", to_do.append)
    monkeypatch.setattr(atexit, "unregister", to_do.remove)
    model = Model(tiny_model)
    context = Context(model, EXACT)
    assert to_do == [model.close, context.close]
    context.close()
    model.close()
    assert to_do == []
