"""The command ``speculation`` and its subcommands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from app.worker.process import start_early

USAGE = """\
usage: speculation COMMAND [flags]

  chat        chat in the browser, with an endpoint for other programs
  serve       the endpoint alone
  bench       measure how fast the methods are on this machine
  train       train drafting heads for a model
  models      list the known models, or download some
  devices     list the devices that can compute a model
  rpc-worker  compute layers of a model for another machine

speculation COMMAND --help shows a command's flags, speculation --version the version.
"""
COMMANDS = {  # the module and function of each, and flags that come first
    "chat": ("app.start", "main", ()),
    "serve": ("app.start", "main", ("--no-page",)),
    "bench": ("speculation.bench.__main__", "main", ()),
    "train": ("speculation.train.__main__", "main", ()),
    "models": ("app.models", "main", ()),
    "devices": ("app.machines", "list_devices", ()),
    "rpc-worker": ("app.machines", "work", ()),
}


def main(arguments: Sequence[str] | None = None, prog: str = "speculation") -> int:
    """Run one command with the flags after it; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"chat", "serve"}.intersection(given[:1]) and not {"-h", "--help"}.intersection(given):
        start_early()
    from speculation.system.console import FAILED, VERSION, open_missing, run_command, say

    def run() -> int:
        name, *flags = given or ["--help"]
        if name in COMMANDS:
            module, function, before = COMMANDS[name]
            # Imported where used, so that the bench does not wait for Gradio.
            command = getattr(import_module(module), function)
            code: int = command([*before, *flags], prog=f"{prog} {name}")
            return code
        if name in ("-h", "--help", "--version"):
            print(VERSION if name == "--version" else USAGE.strip())
            return 0
        say(f"speculation: unknown command {name!r}; `speculation --help` lists them")
        return FAILED

    open_missing()
    return run_command(run, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
