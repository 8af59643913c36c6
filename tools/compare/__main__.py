"""``python -m tools.compare DIR``: our methods beside llama.cpp's own programs in DIR."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from speculation.bench.json_file import check_writable
from speculation.bench.options import add_json, add_model, add_prompts, add_runs, complete
from speculation.system.console import INTERRUPTED, OK, run_command
from tools.compare.mode import Options, compare
from tools.compare.programs import PROGRAMS

# Methods without a draft model or heads; the others are added if what they need is loaded.
COMPARED = tuple(program.method for program in PROGRAMS.values() if not program.drafts_by)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; return the exit code."""
    return run_command(
        lambda: _compare(parse_options(arguments)), "interrupted before anything was measured"
    )


def _compare(options: Options) -> int:
    if options.json is not None:
        check_writable(options.json)
    return OK if compare(options) else INTERRUPTED


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Exits with code 2 when it is wrong, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare",
        description="Compare our methods with llama.cpp's own programs, one after the other, on "
        "the first turns of the prompts (docs/measure.md). Decoding is greedy.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder of llama.cpp's programs: build/bin"
    )
    add_runs(parser, f"methods to compare ({' '.join(COMPARED)}, and those that are loaded)")
    add_prompts(parser)
    add_model(parser)
    add_json(parser)
    values = vars(parser.parse_args(arguments))
    complete(parser, values, COMPARED)
    return Options(**values)


if __name__ == "__main__":
    sys.exit(main())
