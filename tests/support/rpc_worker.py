"""An RPC worker on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tools.compare import free_port

_START_SECONDS = 30.0


@contextmanager
def worker(*flags: str, port: int = 0) -> Iterator[int]:
    """An RPC worker on this machine; its port."""
    port = port or free_port()
    command = [sys.executable, "-m", "app.cli", "rpc-worker", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the worker did not start")
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    """Whether a program listens on ``port``. Does not connect: a worker serves one at a time."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False
