"""llama.cpp's RPC backend: workers on other machines, whose devices compute layers of a model.

llama.cpp neither encrypts nor authenticates what goes over the network, and it ends this process if
a worker is not there or goes away.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batching.errors import ModelError
from batching.llama.library import declared
from batching.llama.log import initialise

PORT = 50052  # llama.cpp's
_ANSWER_SECONDS = 15.0
_TRY = "import sys; from batching.llama.rpc import add; add(sys.argv[1])"

_connected: set[str] = set()
_lock = threading.Lock()


def connect(workers: Sequence[str]) -> None:
    """Add the devices of ``workers``, HOST:PORT, to llama.cpp's, unless they are there already.

    Raises ModelError if one does not answer or has another version, or if this build has no RPC.
    """
    with _lock:
        for worker in workers:
            if worker not in _connected:
                _check(worker)
                add(worker)
                _connected.add(worker)


def is_connected() -> bool:
    """Whether there are workers."""
    return bool(_connected)


def _check(worker: str) -> None:
    """Connect from another process first, since a failure ends it."""
    host, _, port = worker.rpartition(":")
    if not re.fullmatch(r"[^:\s]+", host) or not port.isdigit() or not 0 < int(port) < 65536:
        raise ModelError(f"{worker!r} is no address of a worker; give HOST:PORT")
    _function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    start = "start `speculation rpc-worker` there, from the same version as here"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, worker],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            env={
                **os.environ,
                "GGML_NO_BACKTRACE": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"the worker {worker} did not answer within {_ANSWER_SECONDS:g} s; it serves one "
            f"program at a time, so another one may use it"
        ) from None
    if tried.returncode:
        said = [line for line in tried.stderr.splitlines() if "RPC" in line or "onnect" in line]
        reason = re.sub(r"^\S+:\d+: ", "", said[0]) if said else f"exit {tried.returncode}"
        raise ModelError(f"the worker {worker} cannot be used: {reason}; {start}")


def add(worker: str) -> None:
    """Connect to a worker. Ends the process if that fails."""
    initialise()
    add_server = _function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = _function("ggml_backend_register", None, ctypes.c_void_p)
    register(add_server(worker.encode()))


def serve(host: str, port: int, devices: Sequence[Any], n_threads: int, cache: Path | None) -> None:
    """Compute for one client after another, on ``devices``. Returns only if it cannot start.

    cache  a folder for the weights that clients send, so that they are sent once
    """
    initialise()
    types = ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_size_t] * 2, ctypes.c_void_p
    start = _function("ggml_backend_rpc_start_server", None, *types)
    handles = (ctypes.c_void_p * len(devices))(*[device.handle for device in devices])
    folder = None if cache is None else os.fsencode(cache)
    start(f"{host}:{port}".encode(), folder, n_threads, len(devices), handles)


def _function(name: str, *types: Any) -> Any:
    function = declared(name, *types)
    if function is None:
        raise ModelError(
            "this llama.cpp was built without RPC; build it with CMAKE_ARGS=-DGGML_RPC=on"
        )
    return function
