"""The command ``speculation`` and its subcommands."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence

from speculation.system.console import FAILED, INTERRUPTED, VERSION, drop_output, open_missing

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


def main(arguments: Sequence[str] | None = None, prog: str = "speculation") -> int:
    """Run one command with the flags after it; return the exit code."""
    open_missing()
    given = sys.argv[1:] if arguments is None else arguments
    return without_traceback(lambda: _run(given, prog))


def without_traceback(command: Callable[[], int]) -> int:
    """Run a command; return its exit code, also after Ctrl-C, or if nobody reads its output."""
    try:
        code = command()
        if not sys.stdout.closed:
            sys.stdout.flush()  # a reader that has gone is noticed now
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        drop_output()  # whose reader has gone, or whose disk is full
        return FAILED


def _run(given: Sequence[str], prog: str) -> int:
    name, *flags = given or ["--help"]
    # Imported where used, so that the bench does not wait for Gradio.
    if name == "chat":
        from app.start import main as chat

        return chat(flags, prog=f"{prog} chat")
    if name == "serve":
        from app.start import main as serve

        return serve(["--no-page", *flags], prog=f"{prog} serve")
    if name == "bench":
        from speculation.bench.__main__ import main as bench

        return bench(flags, prog=f"{prog} bench")
    if name == "train":
        from speculation.train.__main__ import main as train

        return train(flags, prog=f"{prog} train")
    if name == "models":
        from app.models import main as models

        return models(flags)
    if name == "devices":
        from app.machines import list_devices

        return list_devices(flags)
    if name == "rpc-worker":
        from app.machines import work

        return work(flags)
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(VERSION)
        return 0
    print(
        f"speculation: unknown command {name!r}; `speculation --help` lists them",
        file=sys.stderr,
    )
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
