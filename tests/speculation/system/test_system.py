"""Files and output of commands, and the sentence that says which device computes."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from batching.llama.devices import Device, Placement
from batching.llama.model import Model
from speculation.system import computed_by as module
from speculation.system.computed_by import computed_by, missing
from speculation.system.console import replace_unencodable
from speculation.system.files import digest, require_writable
from tests.support.tiny_gguf import write_tiny_gguf
from tools.gpu_build import Choice, Machine, choose


def test_odd_paths_are_refused_and_data_told_apart_by_bytes(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "h.gguf", "no such folder"),
        (tmp_path / ("x" * 250), "File name too long"),
    ):
        with pytest.raises(InvalidParameter, match=f"{reason}.*; give a file in a folder that"):
            require_writable(path)
    require_writable(tmp_path / "h.gguf")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "d.jsonl"
    file.write_bytes(b"abc")
    assert digest(file) == "ba7816bf8f01cfea"
    file.write_bytes(b"abd")
    assert digest(file) == "a52d159f262b2c6d"


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="there is no /dev/null")
def test_a_device_is_not_replaced() -> None:
    with pytest.raises(InvalidParameter, match="cannot write /dev/null: it is a device"):
        require_writable(Path("/dev/null"))


def test_characters_a_pipe_cannot_encode_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    replace_unencodable()
    print("1.5 × of ж", flush=True)
    assert pipe.buffer.getvalue() == b"1.5 \xd7 of ?\n"


CPU = Device("cpu", "CPU", "AMD EPYC", 0)
H100 = Device("gpu", "CUDA0", "NVIDIA H100", 0)
FLAGS = "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=90"
TOOLKIT = "the CUDA toolkit (Debian: nvidia-cuda-toolkit)"


@pytest.mark.parametrize(
    ("placement", "model_devices", "found", "sentence"),
    [
        (Placement(), [], [], "Computed by the CPU (AMD EPYC)."),
        (Placement(), [H100], [H100], "Computed by CUDA0 (NVIDIA H100)."),
        (Placement(2), [H100], [H100],
         "Computed by CUDA0 (NVIDIA H100), 1 of 2 layers, and the CPU (AMD EPYC)."),
        (Placement(n_cpu_moe=1), [H100], [H100],
         "Computed by CUDA0 (NVIDIA H100), 2 of 2 layers without the experts of the first 1, "
         "and the CPU (AMD EPYC)."),
        (Placement(0), [H100], [H100],
         "Computed by the CPU (AMD EPYC): the settings leave out CUDA0 (NVIDIA H100)."),
        (Placement(devices=()), [], [H100],
         "Computed by the CPU (AMD EPYC): the settings leave out CUDA0 (NVIDIA H100)."),
        (Placement(), [], [H100],
         "Computed by the CPU (AMD EPYC): no layer fits into the free memory of CUDA0 (NVIDIA "
         "H100)."),
    ],
)  # fmt: skip
def test_the_sentence_names_the_devices_and_the_reason(
    placement: Placement, model_devices: Sequence[Device], found: Sequence[Device], sentence: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "devices", lambda: [CPU, *found])
    monkeypatch.setattr(module, "gpus", lambda: found)
    monkeypatch.setattr(module, "_choice", lambda: asdict(Choice()))
    path = write_tiny_gguf(tmp_path / "m.gguf", n_expert=4)
    with Model(path, placement=replace(placement, devices=None)) as model:
        model.placement, model.devices = placement, list(model_devices)
        assert computed_by(model) == sentence
        if not found:
            choice = choose(Machine("NVIDIA H100", ("90",)))
            monkeypatch.setattr(module, "_choice", lambda: asdict(choice))
            assert computed_by(model) == (
                "Computed by the CPU (AMD EPYC): this machine has an NVIDIA GPU (NVIDIA H100), but "
                f"llama.cpp was compiled without CUDA; install {TOOLKIT}, then run `sh tools/run "
                "chat`."
            )


@pytest.mark.parametrize(
    ("choice", "is_built", "why"),
    [
        (Choice(), False, ""),
        (Choice("a GPU (Radeon)", "Vulkan", needs="glslc (Debian's names)"), False,
         "this machine has a GPU (Radeon), but llama.cpp was compiled without Vulkan; install "
         "glslc (Debian's names), then run `sh tools/run chat`"),
        (Choice("an NVIDIA GPU (L4)", "CUDA", FLAGS), False,
         "this machine has an NVIDIA GPU (L4), but llama.cpp was compiled without CUDA; "
         f'`CMAKE_ARGS="{FLAGS}" sh tools/run chat` compiles it'),
        (Choice("an NVIDIA GPU (L4)", "CUDA", needs=TOOLKIT), True,
         "this machine has an NVIDIA GPU (L4), but llama.cpp finds no device for CUDA; see "
         "whether `nvidia-smi` does"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_listed_is_explained(choice: Choice, is_built: bool, why: str) -> None:
    assert missing(asdict(choice), is_built) == why


def test_the_installation_tells_its_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (module._choice() or {}).keys() == asdict(Choice()).keys()
    if sys.platform == "linux":
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho NVIDIA L4, 8.9\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert (module._choice() or {})["gpu"] == "an NVIDIA GPU (NVIDIA L4)"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert module.why_no_gpu() == ""
