"""The commands chat and serve: parse the flags, load the model, serve the page and the endpoint.

The libraries of the server take seconds to import: that goes on while the engine's process starts
and loads the model.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.hosts import PORTS, address, bind, is_loopback, name_of
from app.worker.backend import Backend
from app.worker.messages import SAMPLING, Failed, Loaded, Loading
from app.worker.remote import RemoteBackend
from batching.errors import InvalidParameter, SpeculationError
from speculation.methods import METHODS, load_method_file, parse_method
from speculation.registry.fit import Wanted, context_in_words
from speculation.registry.model_spec import ModelSpec, add_model_flags, at_least
from speculation.sampling import SamplingParams
from speculation.settings import DEFAULT_METHOD
from speculation.system.console import FAILED, VERSION, drop_output, say
from speculation.system.files import in_words, read_text

PROGRESS_SECONDS = 5.0  # between two lines about a load, if they are not read in a terminal


def parse_flags(
    arguments: Sequence[str] | None = None, prog: str = "python -m app chat"
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve a local model: a chat in the browser that shows speculative decoding at "
        "work, and an endpoint for other programs, with OpenAI's and llama-server's routes.",
    )
    add = parser.add_argument
    add("--version", action="version", version=VERSION)
    add_model_flags(parser)
    add(
        "--method",
        help=f"{', '.join(METHODS)}, or FILE.py:SPEC for one of your own (examples/README.md); "
        f"optionally with :parameter=value,… "
        f"(default: {DEFAULT_METHOD})",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (%(default)s). The page opens as localhost and under this "
        "name; if other machines can reach it, also under any IP address, and with 0.0.0.0 under "
        "the machine's name",
    )
    add(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="another host name of this server, such as a proxy's, or an origin whose pages may "
        "use it, such as https://app.example or 'chrome-extension://*'; may be repeated",
    )
    help_ = "port to listen on (default: the first free one from 7860)"
    add("--port", type=at_least(1, 65535), help=help_)
    add("--no-browser", action="store_true", help="do not open the browser")
    add("--no-page", action="store_true", help="serve only the endpoint, without the chat")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that requests must have, as a bearer token or, for the page, as a password; "
        "may be repeated. The list of processes shows it, unlike a file or SPECULATION_API_KEY, "
        "which holds one key if no flag gives any",
    )
    add("--api-key-file", metavar="FILE", help="a file with more such keys, one a line")
    add("--alias", default="", help="the model's name in the endpoint's answers")
    add(
        "--sampling",
        type=_sampling,
        metavar="NAME=VALUE,…",
        default=dict(SAMPLING),
        help="sampling of requests to the endpoint that say nothing of it (default: llama-server's "
        "temperature=0.8,top_k=40,top_p=0.95,min_p=0.05)",
    )
    add("--max-tokens", type=at_least(1), help="most tokens in a reply of the endpoint")
    add("--timeout", type=float, default=3600.0, help="most seconds for a call (%(default)g)")
    add(
        "--memory",
        metavar="FILE",
        help="keep what the model reads and writes in FILE, so that the methods suffix and auto "
        "can draft from it after a restart (default: in memory only)",
    )
    add(
        "--switch-models",
        action="store_true",
        help="load the model that a request names, if it is on this machine, once no other request "
        "uses the present one",
    )
    add(
        "--unload-after",
        type=float,
        metavar="SECONDS",
        help="free the model's memory when no request has come for so long; the next one loads it "
        "again (only without the page)",
    )
    add("--chats", metavar="FILE", help="keep chats in FILE (default: in the user's data folder)")
    add("--trace-batches", metavar="FILE", help="write one JSON line per decode to FILE")
    flags = parser.parse_args(arguments)
    if flags.api_key and not all(flags.api_key):
        parser.error("--api-key is empty; give a key, or leave it out")
    flags.api_key = [*(flags.api_key or ()), *_keys_in(flags.api_key_file, parser)]
    if not flags.api_key and (key := os.environ.get("SPECULATION_API_KEY")):
        flags.api_key = [key]
    for name in flags.allow_host or ():
        if not name_of(name):
            parser.error(
                f"--allow-host is {name!r}; give a host name, or an origin such as "
                "https://app.example"
            )
    if flags.unload_after is not None and not (flags.no_page and flags.unload_after > 0):
        parser.error(
            f"--unload-after is {flags.unload_after:g}; give seconds above 0, and only to serve "
            "without the page, which would lose its model"
        )
    if flags.timeout <= 0:
        parser.error(f"--timeout is {flags.timeout:g}; give a number of seconds above 0")
    flags.method_file = flags.method or ""
    try:
        flags.method = flags.method and load_method_file(flags.method)
        parse_method(flags.method or DEFAULT_METHOD)
        flags.spec = ModelSpec.of(flags)
        flags.spec.context  # noqa: B018 (it checks)
    except SpeculationError as error:
        parser.error(str(error))
    return flags


def _keys_in(path: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """The keys in a file. Exits if it has none."""
    if path is None:
        return []
    try:
        found = read_text(Path(path)).removeprefix("\ufeff").split("\n")
    except (OSError, InvalidParameter) as error:
        parser.error(f"cannot read --api-key-file: {error}")
    keys = [line.strip() for line in found if line.strip()]
    if not keys:
        parser.error(f"--api-key-file {path} has no key; write one a line, or leave it out")
    return keys


def _sampling(text: str) -> dict[str, Any]:
    """``temperature=0.8,seed=42`` as fields of ``SamplingParams``."""
    found: dict[str, Any] = {"temperature": SAMPLING["temperature"]}
    try:
        for name, _, value in (part.partition("=") for part in text.split(",")):
            found[name] = float(value) if "." in value else int(value)
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, SpeculationError) else "give NAME=NUMBER,…"
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}") from None
    return found


def common_memory(flags: argparse.Namespace) -> str | None:
    """The memory of requests without one of several keys: none if there may be several people
    behind them."""
    is_one = len(flags.api_key) == 1 if flags.api_key else is_loopback(flags.host)
    return "" if is_one else None


def main(arguments: Sequence[str] | None = None, prog: str = "python -m app chat") -> int:
    """Serve until Ctrl-C; return the exit code."""
    flags = parse_flags(arguments, prog)
    listening = _bound(flags.host, flags.port)
    spec: ModelSpec = flags.spec
    backend = RemoteBackend(
        trace_batches=flags.trace_batches,
        memory=flags.memory,
        common_memory=common_memory(flags),
        method_file=flags.method_file,
    )
    url = address(flags.host, listening)
    from app.store import InUse, Store, StoreError, default_file

    store: Store | None = None
    if not flags.no_page:
        try:
            store = Store(flags.chats or default_file(), url)
        except InUse as error:
            listening.close()
            say(f"{error} To start another server, name another file with --chats")
            if not flags.no_browser:
                webbrowser.open(error.address)
            return 0
        except StoreError as error:
            sys.exit(f"error: {error} Name another file with --chats.")
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread:  # SIGTERM stops a service: like Ctrl-C, it must not lose what is saved then
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    where = f"The endpoint will be at {url}v1" if flags.no_page else f"The page will be at {url}"
    say(f"Loading {spec.model}. {where}")
    if not (flags.api_key or is_loopback(flags.host)):
        say("There is no API key: whoever reaches this address may use it (see --api-key-file)")
    failures: list[Failed] = []
    is_ending = threading.Event()
    loading = threading.Thread(target=_load, args=(backend, spec, failures, is_ending), daemon=True)
    loading.start()
    close: Callable[[], object] | None = None
    try:
        from app.site import serve_site

        close = serve_site(
            listening,
            backend,
            flags,
            store,
            method=flags.method or DEFAULT_METHOD,
            is_one=common_memory(flags) is not None,
        )
        if flags.no_page:  # the page opens at once, and shows the load or why it failed
            while loading.is_alive():
                loading.join(0.1)
            if failures:
                return FAILED
        what = f"The endpoint is at {url}v1" if flags.no_page else f"Speculation runs at {url}"
        with suppress(KeyboardInterrupt):
            say(f"{what} (press Ctrl-C to stop)", sys.stdout)
            if not flags.no_page and not flags.no_browser:
                webbrowser.open(url)
            while True:  # Ctrl-C does not interrupt waiting for an event on Windows or with musl
                time.sleep(3600)
        return 0
    finally:
        is_ending.set()
        # The server ends with the process and does not wait for open pages. From here on Ctrl-C
        # ends the process whatever its threads do.
        if is_main_thread:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if close is not None:
            close()
        if not backend.close():
            say("The engine does not respond; exiting anyway")
            os._exit(1)  # else Python waits for the threads that wait for the engine
        drop_output()  # what nobody could read must not fail the exit


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket to listen on. Exits if there is none."""
    try:
        return bind(host, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            sys.exit(f"--host {host} is not an address of this machine ({error.strerror})")
        where = f"{host}, port {port or f'{PORTS[0]} to {PORTS[-1]}'}"
        sys.exit(f"{where}: {error.strerror}; change --port or --host")


def _load(
    backend: Backend, spec: ModelSpec, failures: list[Failed], is_ending: threading.Event
) -> None:
    """Load the model; tell what computes it, or why it failed, which is added to ``failures``."""
    told, is_terminal = time.monotonic(), sys.stderr.isatty()
    for event in backend.load(spec):  # on stderr: the first line of stdout is the address
        if isinstance(event, Loading):
            if is_terminal:  # in one line
                say(f"\r\x1b[K{_progress(event)}", end="")
            elif time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                say(_progress(event))
            continue
        if is_terminal:
            say("\r\x1b[K", end="")
        if isinstance(event, Loaded):
            model, trained = event.model, backend.status().facts.n_ctx_train
            asked = Wanted(spec.n_ctx, spec.kv_type)
            say(f"{model.computed_by}\n{context_in_words(model.n_ctx, trained, asked)}")
        if isinstance(event, Failed) and not is_ending.is_set():
            failures.append(event)
            say(f"error: {event.flags_message or event.message}")


def _progress(now: Loading) -> str:
    share = f"{100 * now.done // now.total}%" if now.total else ""
    if now.stage == "download":
        return f"Downloading {now.model}: {share} of {in_words(now.total)}"
    return f"Starting {now.model}" if share == "100%" else f"Loading {now.model}: {share}"
