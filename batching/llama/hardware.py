"""Hardware detection: physical cores and available memory."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as C

from batching.errors import InvalidParameter


def build_info() -> str:
    """The library's version and its CPU and GPU features."""
    features = C.llama_print_system_info().decode().strip(" |")
    if "CUDA" in features and "GGML_CUDA_DISABLE_GRAPHS" in os.environ:
        features += " | without CUDA graphs"
    return f"llama-cpp-python {llama_cpp.__version__}: {features}"


# Model bytes from which CUDA graphs cost more than they save where batches change their size. On an
# H200, plain steps of 1.9 to 7 GB take 1 to 5% longer without graphs, but each change of size 0.5
# ms instead of 7; a model of 0.1 GB loses half of its speed.
_WITHOUT_GRAPHS = 1_000_000_000


def choose_cuda_graphs(n_bytes: int) -> None:
    """Turn CUDA graphs off for a model of ``n_bytes`` unless it is small.

    ggml reads the variable once a process, at its first decode on a GPU, so the first model
    decides. ``SPECULATION_CUDA_GRAPHS=on`` keeps graphs, ``off`` turns them off for every model.
    """
    wanted = os.environ.get("SPECULATION_CUDA_GRAPHS", "")
    if wanted not in ("", "on", "off"):
        raise InvalidParameter(f"SPECULATION_CUDA_GRAPHS is {wanted!r}; set it to on or off")
    if wanted == "off" or (not wanted and n_bytes >= _WITHOUT_GRAPHS):
        os.environ.setdefault("GGML_CUDA_DISABLE_GRAPHS", "1")


def physical_cores() -> int:
    """Physical cores this process may use: the best thread count for llama.cpp."""
    if sys.platform == "linux":
        cores = set()
        for cpu in os.sched_getaffinity(0):
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            cores.add(siblings.read_text() if siblings.exists() else str(cpu))
        return max(1, len(cores))
    if sys.platform == "darwin":
        # Performance cores, or all physical cores on Macs with one kind (Intel).
        for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            n_cores = _sysctl(name)
            if n_cores:
                return n_cores
    return _windows_cores() or max(1, (os.cpu_count() or 2) // 2)


def _sysctl(name: str) -> int:
    """An integer macOS sysctl, or 0."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    query = ctypes.CDLL(None).sysctlbyname
    failed = query(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value


def _windows_cores() -> int:
    """Physical cores on Windows, with or without hyper-threading; 0 on other systems."""
    if sys.platform != "win32":
        return 0
    query = ctypes.windll.kernel32.GetLogicalProcessorInformationEx
    size = ctypes.c_uint32(0)
    query(0, None, ctypes.byref(size))  # relation 0 = cores; returns the buffer size
    records = ctypes.create_string_buffer(size.value)
    return _count_records(records.raw) if query(0, records, ctypes.byref(size)) else 0


def _count_records(data: bytes) -> int:
    """Number of records; each has its length in its second four bytes."""
    n = at = 0
    while at + 8 <= len(data):
        at += max(8, struct.unpack_from("<I", data, at + 4)[0])
        n += 1
    return n


def available_memory() -> int | None:
    """Bytes of available main memory, or None if unknown.

    On macOS all physical memory, since it swaps other programs out. Not needed on Windows, where an
    allocation that does not fit fails and llama.cpp reports it.
    """
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform != "win32" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
