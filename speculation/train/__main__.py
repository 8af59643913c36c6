"""``python -m speculation.train``: trains drafting heads for a model on your texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from batching.errors import SpeculationError
from speculation.system.console import replace_unencodable, worded
from speculation.train import commands

OK, FAILED, INTERRUPTED = 0, 2, 130

DESCRIPTION = """\
Train drafting heads or a draft model for a GGUF model, the target. See docs/training.md.

The target reads the data; its hidden states and choices are stored in a folder. Training learns
from them and measures the result on held-out texts. Ctrl-C while the target reads loses nothing:
run the same command again to resume. The target's own replies are the best data: give prompts and
--generate.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code. Errors end with one line on stderr."""
    replace_unencodable()
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (SpeculationError, OSError, UnicodeDecodeError) as error:
        print(f"error: {worded(error)}", file=sys.stderr)
        return FAILED
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError when out of memory
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        print(
            "error: out of memory in a training step; lower --batch or give --vocab; the "
            "collected states are kept",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m speculation.train",
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
