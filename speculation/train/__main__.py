"""``python -m speculation.train``: trains drafting heads for a model on your texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from speculation.system.console import FAILED, run_command
from speculation.train import commands

DESCRIPTION = """\
Train drafting heads for a GGUF model, the target. See docs/training.md.

The target reads the data; its hidden states and choices are stored in a folder. Training learns
from them and measures the result on held-out texts. Ctrl-C while the target reads loses nothing:
run the same command again to resume. The target's own replies are the best data: give prompts and
--generate.
"""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m speculation.train") -> int:
    """Run a subcommand; return the exit code."""
    args = _parser(prog).parse_args(arguments)
    try:
        return run_command(
            lambda: args.run(args), "interrupted; run the same command again to resume"
        )
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError when out of memory
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        print(
            "error: out of memory in a training step; lower --batch or give --vocab; the "
            "collected states are kept",
            file=sys.stderr,
        )
        return FAILED


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, kind in commands.KINDS.items():
        subparser = subparsers.add_parser(name, help=f"train {kind.what}", allow_abbrev=False)
        commands.add_arguments(subparser, name)
        subparser.set_defaults(run=partial(commands.run, name))
    return parser


if __name__ == "__main__":
    sys.exit(main())
