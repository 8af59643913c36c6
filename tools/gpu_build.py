"""Which GPU this machine has, and how to compile llama.cpp for it.

Needs only the standard library: ``tools/install.py`` imports it before anything is installed.
As a program, it prints the choice for this machine as JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_UNKNOWN = "unknown model"
_SECONDS = 20  # for a program that describes the GPU; a driver that starts takes a few


@dataclass(frozen=True)
class Machine:
    """What a machine has for computing on its GPU.

    nvidia         name of its first NVIDIA GPU; empty = none
    architectures  of its NVIDIA GPUs, as CMake writes them: ``90``; empty = not known
    nvcc           path of the CUDA compiler; empty = none
    targets        the architectures that ``nvcc`` compiles for; empty = not known
    vulkan         name of the first GPU that Vulkan can use; empty = none
    vulkan_needs   Debian packages that are missing for compiling the Vulkan backend
    """

    nvidia: str = ""
    architectures: tuple[str, ...] = ()
    nvcc: str = ""
    targets: tuple[str, ...] = ()
    vulkan: str = ""
    vulkan_needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """How llama.cpp is compiled for a machine's GPU.

    gpu      the GPU, for people; empty = there is none
    backend  ``CUDA`` or ``Vulkan``
    flags    for CMake; empty = it cannot be compiled yet
    needs    what to install first
    """

    gpu: str = ""
    backend: str = ""
    flags: str = ""
    needs: str = ""


def choose(machine: Machine) -> Choice:
    """CUDA for an NVIDIA GPU, for its architecture alone; Vulkan if that is all there is."""
    nvidia, vulkan = f"an NVIDIA GPU ({machine.nvidia})", f"a GPU ({machine.vulkan})"
    too_new = set(machine.architectures).difference(machine.targets or machine.architectures)
    if machine.nvidia and machine.nvcc and not too_new:
        architectures = ";".join(machine.architectures) or "native"
        settings = {"CMAKE_CUDA_COMPILER": machine.nvcc, "CMAKE_CUDA_ARCHITECTURES": architectures}
        flags = ["-DGGML_CUDA=on", *(f"-D{name}={value}" for name, value in settings.items())]
        return Choice(nvidia, "CUDA", shlex.join(flags))
    if machine.vulkan and not machine.vulkan_needs:
        return Choice(nvidia if machine.nvidia else vulkan, "Vulkan", "-DGGML_VULKAN=on")
    if machine.nvidia:
        toolkit = "the CUDA toolkit (Debian: nvidia-cuda-toolkit)"
        if machine.nvcc:
            toolkit = f"a newer CUDA toolkit: {machine.nvcc} cannot compile for this GPU"
        return Choice(nvidia, "CUDA", needs=toolkit)
    if machine.vulkan:
        return Choice(vulkan, "Vulkan", needs=f"{' '.join(machine.vulkan_needs)} (Debian's names)")
    return Choice()


def look(root: Path = Path("/")) -> Machine:
    """What this machine has; nothing on systems other than Linux. ``root`` is where its files are.

    Asks ``nvidia-smi``, ``nvcc`` and ``vulkaninfo`` if they are there. CUDA need not be installed.
    """
    if sys.platform != "linux":
        return Machine()
    name, architectures = _nvidia(root)
    nvcc = _nvcc(root) if name else ""
    targets = _lines(nvcc, "--list-gpu-arch") if nvcc else []
    vulkan = _vulkan(root)
    return Machine(
        name,
        architectures,
        nvcc,
        tuple(line.removeprefix("compute_") for line in targets),
        vulkan,
        tuple(_vulkan_needs(root)) if vulkan else (),
    )


def _nvidia(root: Path) -> tuple[str, tuple[str, ...]]:
    """The first NVIDIA GPU's name, and the architectures of all."""
    rows = [
        [field.strip() for field in line.split(",")]
        for line in _lines("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    ]
    if rows:
        found = {row[-1].replace(".", "") for row in rows}
        return rows[0][0], tuple(sorted((each for each in found if each.isdigit()), key=int))
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.partition(":")[::2] for line in _text(file).splitlines())
        return fields.get("Model", "").strip() or _UNKNOWN, ()
    return "", ()


def _nvcc(root: Path) -> str:
    folders = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    folders.append(str(root / "usr/local/cuda"))
    places = [None, *(str(Path(folder, "bin")) for folder in folders if folder)]  # None: PATH
    return next(filter(None, (shutil.which("nvcc", path=place) for place in places)), "")


def _vulkan(root: Path) -> str:
    """The first GPU that Vulkan can use. A CPU that emulates one does not count."""
    if shutil.which("vulkaninfo"):
        is_gpu = False
        for line in _lines("vulkaninfo", "--summary"):
            name, _, value = (part.strip() for part in line.partition("="))
            if name == "deviceType":
                is_gpu = value.endswith("_GPU")
            elif name == "deviceName" and is_gpu:
                return value
        return ""
    folders = [*root.glob("usr/lib*"), *root.glob("usr/lib/*-linux-gnu*")]
    has_loader = any((folder / "libvulkan.so.1").exists() for folder in folders)
    return _UNKNOWN if has_loader and any(root.glob("dev/dri/renderD*")) else ""


def _vulkan_needs(root: Path) -> Iterator[str]:
    prefixes = [root / "usr", root / "usr/local"]
    prefixes += map(Path, filter(None, [os.environ.get("VULKAN_SDK")]))
    headers = [prefix / "include/vulkan/vulkan_core.h" for prefix in prefixes]
    configured = ("share/cmake", "lib/cmake", "lib/*/cmake")
    if not shutil.which("glslc"):
        yield "glslc"
    if not any("VK_API_VERSION_1_4" in _text(header) for header in headers):
        yield "libvulkan-dev 1.4"
    if not any(
        any(prefix.glob(f"{folder}/SPIRV-Headers/SPIRV-HeadersConfig.cmake"))
        for prefix in prefixes
        for folder in configured
    ):
        yield "spirv-headers"


def _lines(program: str, *arguments: str) -> list[str]:
    """The lines that a program prints; none if it is missing or fails."""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in done.stdout.splitlines()]
    return [line for line in lines if line] if done.returncode == 0 else []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(asdict(choose(look()))))
