"""The command ``speculation`` and its subcommands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """\
usage: speculation COMMAND [flags]

  chat        chat in the browser, with an endpoint for other programs
  serve       the endpoint alone
  bench       measure how fast the methods are on this machine
  train       train drafting heads for a model
  models      list the known models, or download some
  devices     list the devices that can compute a model
  rpc-worker  compute layers of a model for another machine

speculation COMMAND --help shows a command's flags.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command with the flags after it; return the exit code."""
    name, *flags = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Imported where used, so that the bench does not wait for Gradio.
    if name == "chat":
        from app.__main__ import main as chat

        chat(flags)
        return 0
    if name == "serve":
        from app.__main__ import main as serve

        serve(["--no-page", *flags], prog="speculation serve")
        return 0
    if name == "bench":
        from speculation.bench.__main__ import main as bench

        return bench(flags)
    if name == "train":
        from speculation.train.__main__ import main as train

        return train(flags)
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
    print(
        f"speculation: unknown command {name!r}; `speculation --help` lists them",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
