"""``speculation devices`` and ``speculation rpc-worker``: devices here, and for other machines."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Sequence

from app.hosts import is_loopback
from batching.errors import ModelError
from batching.llama import rpc
from batching.llama.devices import Device, Placement, devices, gpus
from batching.llama.hardware import physical_cores
from speculation.system.cache_folder import cache_folder
from speculation.system.computed_by import why_no_gpu
from speculation.system.console import run_command

OPEN = """\
Warning: this worker listens on {host}. It neither asks who connects nor encrypts anything, and
llama.cpp's code for it is not hardened: whoever reaches the port may run code on this machine. Use
it only in a network you trust, or leave --host out and connect through a tunnel:
    ssh -N -L {port}:localhost:{port} THIS-MACHINE"""


def list_devices(arguments: Sequence[str] | None = None, prog: str = "speculation devices") -> int:
    """Print one device per line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Lists the devices that can compute a model, with their memory."
    )
    parser.add_argument("--rpc", metavar="HOST:PORT,…", default="", help="also those of workers")
    flags = parser.parse_args(arguments)

    def run() -> None:
        rpc.connect(Placement.of(rpc=flags.rpc).workers)
        for device in devices():
            print(_line(device))
        if not gpus() and (why := why_no_gpu()):
            print(f"No GPU: {why}", file=sys.stderr)

    return run_command(run)


def _line(device: Device) -> str:
    free, total = device.memory
    memory = f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB free" if total else ""
    return f"{device.name}: {device.description} ({device.kind}{memory})"


def work(arguments: Sequence[str] | None = None, prog: str = "speculation rpc-worker") -> int:
    """Compute for other machines until Ctrl-C; return the exit code if that cannot start."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Computes layers of a model for a program on another machine, which gets "
        "--rpc HOST:PORT. One program at a time; it needs no model file here.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=rpc.PORT, help="port to listen on (%(default)s)")
    add("--device", metavar="NAME,…", help="devices to offer (default: all GPUs, else the CPU)")
    add("--threads", type=int, help="threads of the CPU (default: one per physical core)")
    add("-c", "--cache", action="store_true", help="keep weights on disk, so that they come once")
    flags = parser.parse_args(arguments)
    return run_command(lambda: _serve(flags))


def _serve(flags: argparse.Namespace) -> int:
    offered = _offered(flags.device)
    try:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((flags.host, flags.port))
    except OSError:
        raise ModelError(
            f"{flags.host}, port {flags.port}: in use, or not an address of this machine; change "
            "--port or --host"
        ) from None
    if not is_loopback(flags.host):
        print(OPEN.format(host=flags.host, port=flags.port), file=sys.stderr, flush=True)
    folder = cache_folder() / "rpc" if flags.cache else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    print(f"Worker at {flags.host}:{flags.port} (press Ctrl-C to stop)", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # llama.cpp does not return
    rpc.serve(flags.host, flags.port, offered, flags.threads or physical_cores(), folder)
    return 1


def _offered(names: str | None) -> list[Device]:
    """The devices to offer. Raises InvalidParameter."""
    if names not in (None, "none"):
        return Placement.of(device=names).chosen()
    cpus = [device for device in devices() if device.kind == "cpu"]
    return cpus if names == "none" else gpus() or cpus
