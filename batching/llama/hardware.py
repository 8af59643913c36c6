"""What the machine offers: cores, memory, and the devices that llama.cpp was built for and sees."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import llama_cpp.llama_cpp as C

from batching.llama.library import exported

_KINDS = ("cpu", "gpu", "integrated gpu", "accelerator")  # ggml_backend_dev_type


@dataclass(frozen=True)
class Device:
    """A device that llama.cpp can compute on; ``kind`` is cpu, gpu, integrated gpu, accelerator."""

    kind: str
    name: str


def devices() -> list[Device]:
    """The devices that llama.cpp sees, by the names their makers gave them, if it tells.

    The functions belong to ggml, which llama-cpp-python does not bind.
    """
    count, get = exported("ggml_backend_dev_count"), exported("ggml_backend_dev_get")
    describe = exported("ggml_backend_dev_description")
    kind = exported("ggml_backend_dev_type")
    if None in (count, get, describe, kind):  # another build's library, perhaps
        return []
    count.restype = ctypes.c_size_t
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    kind.argtypes = [ctypes.c_void_p]
    found = []
    for i in range(count()):
        device = get(i)
        number = kind(device)
        name = describe(device).decode("utf-8", "replace")
        found.append(Device(_KINDS[number] if number < len(_KINDS) else "other", name))
    return found


def supports_gpu() -> bool:
    """Whether llama.cpp was built with a GPU backend and finds a GPU."""
    return bool(C.llama_supports_gpu_offload())


def build_info() -> str:
    """The library's version and the CPU and GPU features it was built with."""
    version = getattr(sys.modules["llama_cpp"], "__version__", "?")
    return f"llama-cpp-python {version}: {C.llama_print_system_info().decode().strip(' |')}"


def physical_cores() -> int:
    """Physical cores this process may run on; the number of threads that suits llama.cpp."""
    if hasattr(os, "sched_getaffinity"):
        cores = set()
        for cpu in os.sched_getaffinity(0):
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            cores.add(siblings.read_text() if siblings.exists() else str(cpu))
        return max(1, len(cores))
    if sys.platform == "darwin":
        # The fast cores, or all that are no hyper-threads where they are alike, as in Intel's.
        for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            found = _sysctl(name)
            if found:
                return found
    return _cores_of_windows() or max(1, (os.cpu_count() or 2) // 2)


def _sysctl(name: str) -> int:
    """A number that macOS knows by ``name``, or 0."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value


def _cores_of_windows() -> int:
    """What Windows says, of processors without hyper-threads as well; 0 on other systems."""
    if sys.platform != "win32":
        return 0
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx
    size = ctypes.c_uint32(0)
    ask(0, None, ctypes.byref(size))  # of cores (0) it has so many bytes to tell
    records = ctypes.create_string_buffer(size.value)
    return _count_records(records.raw) if ask(0, records, ctypes.byref(size)) else 0


def _count_records(data: bytes) -> int:
    """How many records there are, each with its length in its second four bytes."""
    n = at = 0
    while at + 8 <= len(data):
        at += max(8, struct.unpack_from("<I", data, at + 4)[0])
        n += 1
    return n


def available_memory() -> int | None:
    """Bytes of main memory that can still be had, or None where that cannot be told.

    Of macOS all there is: it writes out what others hold. Windows refuses what it has not, and
    llama.cpp says so.
    """
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform != "win32" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
