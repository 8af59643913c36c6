"""Which GPU a machine has, as its programs and files tell, and how llama.cpp is compiled for it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_build import Choice, Machine, choose, look

H100 = "an NVIDIA GPU (NVIDIA H100)"
TOOLKIT = "the CUDA toolkit (Debian: nvidia-cuda-toolkit)"
NVCC = "/usr/local/cuda/bin/nvcc"
CUDA = f"-DGGML_CUDA=on -DCMAKE_CUDA_COMPILER={NVCC} "
VULKAN = "-DGGML_VULKAN=on"


def nvidia(*known: Any, **vulkan: Any) -> Machine:
    return Machine("NVIDIA H100", *known, **vulkan)


@pytest.mark.parametrize(
    ("machine", "choice"),
    [
        (Machine(), Choice()),
        (Machine(nvcc=NVCC, vulkan_needs=("glslc",)), Choice()),
        (nvidia(("90",), NVCC, ("80", "90")), Choice(H100, "CUDA", CUDA
         + "-DCMAKE_CUDA_ARCHITECTURES=90")),
        (nvidia(("86", "90"), NVCC), Choice(H100, "CUDA", CUDA
         + "'-DCMAKE_CUDA_ARCHITECTURES=86;90'")),
        (nvidia((), NVCC), Choice(H100, "CUDA", CUDA + "-DCMAKE_CUDA_ARCHITECTURES=native")),
        (nvidia(("90",)), Choice(H100, "CUDA", needs=TOOLKIT)),
        (nvidia(("90",), NVCC, ("70", "80")), Choice(H100, "CUDA",
         needs=f"a newer CUDA toolkit: {NVCC} cannot compile for this GPU")),
        # Vulkan where only that is there.
        (Machine(vulkan="Radeon"), Choice("a GPU (Radeon)", "Vulkan", VULKAN)),
        (nvidia(("90",), vulkan="NVIDIA H100"), Choice(H100, "Vulkan", VULKAN)),
        (Machine(vulkan="Radeon", vulkan_needs=("glslc", "spirv-headers")), Choice("a GPU (Radeon)",
         "Vulkan", needs="glslc spirv-headers (Debian's names)")),
        (nvidia(("90",), vulkan="NVIDIA H100", vulkan_needs=("glslc",)), Choice(H100, "CUDA",
         needs=TOOLKIT)),
    ],
)  # fmt: skip
def test_llama_cpp_is_compiled_for_the_gpu(machine: Machine, choice: Choice) -> None:
    assert choose(machine) == choice


class Disk:
    """A folder for the files of a machine, with its programs in usr/bin, which is all of PATH."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.sh = root, shutil.which("sh")
        (root / "usr/bin").mkdir(parents=True)
        monkeypatch.setenv("PATH", str(root / "usr/bin"))
        for name in ("CUDA_PATH", "CUDA_HOME", "VULKAN_SDK"):
            monkeypatch.delenv(name, raising=False)

    def add(self, name: str, text: str = "") -> str:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    def program(self, name: str, *lines: str, code: int = 0) -> str:
        prints = "\n".join(f"echo '{line}'" for line in lines)
        file = self.add(name, f"#!{self.sh}\n{prints}\nexit {code}\n")
        Path(file).chmod(0o755)
        return file


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(sys, "platform", "linux")
    return Disk(tmp_path, monkeypatch)


linux = pytest.mark.skipif(sys.platform == "win32", reason="the programs are sh scripts")


@linux
def test_nvidia_gpus_and_their_compiler_are_found(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(disk.root) == Machine()
    # The driver without its programs, as in some containers.
    disk.add("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA L4\nIRQ: 1\n")
    assert look(disk.root) == Machine("NVIDIA L4")
    disk.program("usr/bin/nvidia-smi", "NVIDIA L4, 8.9", "RTX 3090, 8.6", "NVIDIA B200, 10.0")
    found = ("NVIDIA L4", ("86", "89", "100"))
    assert look(disk.root) == Machine(*found)
    expected = disk.program("usr/local/cuda/bin/nvcc", "compute_80", "compute_89")
    assert look(disk.root) == Machine(*found, expected, ("80", "89"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(disk.root / name))
        expected = disk.program(f"{name}/bin/nvcc", "nvcc fatal: unknown option", code=1)
        assert look(disk.root) == Machine(*found, expected)
    expected = disk.program("usr/bin/nvcc")
    assert look(disk.root).nvcc == expected
    # A driver that does not work, or does not know the question.
    disk.program("usr/bin/nvidia-smi", "NVIDIA-SMI has failed", code=9)
    assert look(disk.root) == Machine("NVIDIA L4", (), expected)


def summary(kind: str, name: str) -> tuple[str, ...]:
    """A device as vulkaninfo shows it."""
    kind_line = f"\tdeviceType         = PHYSICAL_DEVICE_TYPE_{kind}"
    return ("GPU0:", kind_line, f"\tdeviceName         = {name}")


LLVMPIPE = summary("CPU", "llvmpipe (LLVM 19.1.7, 256 bits)")
RADEON = summary("INTEGRATED_GPU", "AMD Radeon 780M (RADV PHOENIX)")


@linux
def test_a_gpu_for_vulkan_is_found_and_what_is_missing_to_compile(disk: Disk) -> None:
    disk.add("usr/lib/x86_64-linux-gnu/libvulkan.so.1")
    assert look(disk.root) == Machine()
    disk.add("dev/dri/renderD128")
    everything = ("glslc", "libvulkan-dev 1.4", "spirv-headers")
    assert look(disk.root) == Machine(vulkan="unknown model", vulkan_needs=everything)
    disk.program("usr/bin/vulkaninfo", *LLVMPIPE)
    assert look(disk.root) == Machine()
    disk.program("usr/bin/vulkaninfo", *LLVMPIPE, *RADEON)
    found = Machine(vulkan="AMD Radeon 780M (RADV PHOENIX)", vulkan_needs=everything)
    assert look(disk.root) == found
    disk.add("usr/include/vulkan/vulkan_core.h", "#define VK_API_VERSION_1_3")
    disk.program("usr/bin/glslc")
    assert look(disk.root).vulkan_needs == everything[1:]
    disk.add("usr/include/vulkan/vulkan_core.h", "#define VK_API_VERSION_1_4")
    disk.add("usr/share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake")
    assert look(disk.root).vulkan_needs == ()


def test_other_systems_are_not_asked(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.program("usr/bin/nvidia-smi", "NVIDIA L4, 8.9")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert look(disk.root) == Machine()
