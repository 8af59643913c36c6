"""Measures models that are computed by RPC workers, at several delays of the network.

    python -m tools.network MODEL --workers 1 2 --delays 0 0.2 1 5 --methods auto prompt-lookup

All workers run on this machine, each behind a proxy that holds up every packet. For each number of
workers and each delay the benchmark runs the methods and plain decoding in turn, so that the
speed-up is over plain decoding at the same delay.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_START_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.network", description=__doc__)
    add = parser.add_argument
    add("model")
    add("--workers", nargs="+", type=int, default=[1, 2])
    add("--delays", nargs="+", type=float, default=[0.0, 0.2, 1.0, 5.0], help="ms, one way")
    add("--methods", nargs="+", default=["auto", "prompt-lookup"])
    add("--bench", nargs=argparse.REMAINDER, default=[], help="further flags of the benchmark")
    flags = parser.parse_args(arguments)
    for n in flags.workers:
        for delay in flags.delays:
            with ExitStack() as stack:
                ports = [stack.enter_context(worker()) for _ in range(n)]
                addresses = [stack.enter_context(delayed(port, delay / 1e3)) for port in ports]
                found = _bench(flags, addresses)
            print(f"{n} workers, {delay:g} ms: {_row(found)}", flush=True)
    return 0


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


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    """Whether a program listens on ``port``. Does not connect: a worker serves one at a time."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


@contextmanager
def delayed(port: int, seconds: float) -> Iterator[str]:
    """The address of a proxy to ``port`` that passes everything on ``seconds`` later."""
    if not seconds:
        yield f"127.0.0.1:{port}"
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server, port, seconds), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _accept(server: socket.socket, port: int, seconds: float) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # closed
            return
        behind = socket.create_connection(("127.0.0.1", port))
        for one, other in ((client, behind), (behind, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            for target, pair in ((_read, one), (_write, other)):
                threading.Thread(target=target, args=(pair, waiting, seconds), daemon=True).start()


def _read(
    source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]], seconds: float
) -> None:
    data = b"-"
    while data:
        try:
            data = source.recv(1 << 20)
        except OSError:
            data = b""
        waiting.put((time.perf_counter() + seconds, data))


def _write(
    sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]], _seconds: float
) -> None:
    while True:
        due, data = waiting.get()
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
        except OSError:
            return


def _bench(flags: argparse.Namespace, addresses: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "speculation.bench", "--model", flags.model]
        command += ["--rpc", ",".join(addresses), "--json", str(file), *flags.bench]
        command += ["--methods", *flags.methods]
        environment = {**os.environ, "XDG_CACHE_HOME": folder}  # the cost is that of this network
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _row(found: dict[str, Any]) -> str:
    rows = [row for row in found["summary"] if row["category"] == "all"]
    return "; ".join(
        f"{row['method']} {row['tokens_per_second']:.1f} tokens/s, {row['speed_up_overall']:.2f}x, "
        f"{row['tokens_per_step']:.2f} a step, {row['n_different']} of {row['n_runs']} differ"
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
