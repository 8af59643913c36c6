"""``python -m app``: flags, the backend with its model, the page in the browser."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import gradio as gr

from app.page.ui import build, launch
from app.worker.backend import LocalBackend
from app.worker.messages import Failed, ModelSpec
from batching.errors import SpeculationError
from batching.llama.context import FLASH_ATTN, KV_TYPES, ContextParams
from speculation.engine import DEFAULT_METHOD
from speculation.methods import METHODS, parse_method
from speculation.registry import PAIRED, default_model
from speculation.system.console import replace_unencodable


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app", description="A chat in the browser that shows what speculation does."
    )
    add = parser.add_argument
    add("--model", default=default_model(), help="name in models.txt, path or hf:… (%(default)s)")
    add(
        "--draft-model",
        nargs="?",
        const=PAIRED,
        help="a smaller model of the same family, for methods draft and auto: name, path or, with "
        "nothing after it, the one that models.txt names",
    )
    add(
        "--heads",
        nargs="*",
        metavar="HEADS",
        help="drafting heads trained on the model, one file or name a method (docs/heads.md), or, "
        "with nothing after it, those that models.txt names",
    )
    add(
        "--no-mtp",
        action="store_true",
        help="leave the model's own layers for multi-token prediction, if any, out of memory",
    )
    add(
        "--method",
        default=DEFAULT_METHOD,
        help=f"{', '.join(METHODS)}, with :parameter=value,… after it if need be (%(default)s)",
    )
    add("--ctx", type=int, default=0, help="context in tokens; 0 = the model's own, at most 8192")
    add("--gpu-layers", type=int, help="layers on the GPU (all, where there is one)")
    add(
        "--threads",
        type=int,
        help="threads (the physical cores, but for one if the model is below 64 MB)",
    )
    add("--kv-type", default="f16", choices=KV_TYPES, help="type of the KV cache (%(default)s)")
    add("--flash-attn", default="auto", choices=FLASH_ATTN, help="flash attention (%(default)s)")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (%(default)s). Browsers may ask for the page by localhost, by "
        "this name, and, unless it is of the loopback interface alone, by any address; with "
        "0.0.0.0 by the machine's name as well",
    )
    add(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="another name that browsers may ask for the page by, such as a proxy's; may be "
        "repeated",
    )
    add("--port", type=int, help="port to listen on (the first free one from 7860)")
    add("--no-browser", action="store_true", help="do not open the browser")
    add("--trace-batches", metavar="FILE", help="write one JSON line for each decode to FILE")
    flags = parser.parse_args(arguments)
    if flags.port is not None and not 1 <= flags.port <= 65535:
        parser.error(f"--port is {flags.port}; give 1 to 65535")
    flags.heads = [PAIRED] if flags.heads == [] else flags.heads or []
    if flags.gpu_layers is not None and flags.gpu_layers < 0:
        parser.error(f"--gpu-layers is {flags.gpu_layers}; give a whole number from 0")
    try:
        parse_method(flags.method)
        ContextParams(
            n_ctx=flags.ctx,
            n_threads=flags.threads,
            kv_type=flags.kv_type,
            flash_attn=flags.flash_attn,
        )
    except SpeculationError as error:
        parser.error(str(error))
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    replace_unencodable()
    flags = parse_flags(arguments)
    _check_host(flags.host)
    spec = ModelSpec(
        model=flags.model,
        n_ctx=flags.ctx,
        n_gpu_layers=flags.gpu_layers,
        n_threads=flags.threads,
        kv_type=flags.kv_type,
        flash_attn=flags.flash_attn,
        draft_model=flags.draft_model,
        heads=tuple(flags.heads),
        mtp=not flags.no_mtp,
    )
    backend = LocalBackend(trace_batches=flags.trace_batches)
    # The page opens at once and follows the load; a load that fails is shown there.
    loading = threading.Thread(target=_load, args=(backend, spec), daemon=True)
    loading.start()
    try:
        _serve(build(backend, spec, flags.method), flags)
    finally:
        # The server ends with the process, without waiting for pages that are open. From here on
        # Ctrl-C is the system's own, which ends the process whatever its threads do.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not backend.close():
            print("The engine does not stop; leaving it as it is", file=sys.stderr, flush=True)
            os._exit(1)  # or Python would wait for the threads that wait for the engine


def _serve(page: gr.Blocks, flags: argparse.Namespace) -> None:
    """Show the page until Ctrl-C."""
    try:
        url = launch(
            page,
            flags.host,
            flags.allow_host or (),
            server_port=flags.port,
            inbrowser=not flags.no_browser,
            prevent_thread_lock=True,
        )
    except OSError:
        where = f"{flags.host}, port {flags.port or '7860 to 7959'}"
        sys.exit(f"{where}: taken, or no address of this machine; give another --port or --host")
    print(f"Speculation is at {url} (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        while True:  # Ctrl-C does not end waiting for an event on Windows, nor with musl
            time.sleep(3600)


def _check_host(host: str) -> None:
    """End the program where it cannot serve there, whatever the port."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        sys.exit(f"--host {host}: no address of this machine ({error.strerror}); give another")


def _load(backend: LocalBackend, spec: ModelSpec) -> None:
    for event in backend.load(spec):
        if isinstance(event, Failed):
            print(event.message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
