"""``python -m tools.compare --compare-llama-cpp DIR``: the bench's flags to exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from batching.errors import SpeculationError
from speculation.bench.json_file import check_writable
from speculation.bench.options import Options, parse_options
from speculation.bench.resume import read_earlier
from speculation.methods import parse_method
from speculation.system.console import replace_unencodable, worded
from tools.compare.mode import Request, compare
from tools.compare.programs import PROGRAMS

OK, FAILED, INTERRUPTED = 0, 2, 130
# Those that need nothing that drafts: the others come by themselves where there is something.
COMPARED = tuple(program.method for program in PROGRAMS.values() if not program.drafts_by)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; return the exit code. Errors end with one line on stderr."""
    replace_unencodable()
    options = parse_options(arguments)
    if options.compare_llama_cpp is None:
        print(
            "error: give the folder of llama.cpp's programs: --compare-llama-cpp DIR",
            file=sys.stderr,
        )
        return FAILED
    try:
        return OK if compare(_request(options)) else INTERRUPTED
    except (SpeculationError, OSError) as error:
        print(f"error: {worded(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED


def _request(options: Options) -> Request:
    assert options.compare_llama_cpp is not None
    if options.json is not None:
        check_writable(options.json)
        read_earlier(options.json, resume=False)  # an unfinished benchmark is not written over
    return Request(
        folder=options.compare_llama_cpp,
        model=options.model,
        methods=options.methods or [parse_method(name) for name in COMPARED],
        prompts=options.read_prompts(),
        params=options.context_params(),
        n_predict=options.n_predict,
        repeat=options.repeat,
        raw=options.raw,
        thinking=options.thinking,
        draft_model=options.draft_model,
        heads=options.heads,
        gpu_layers=options.gpu_layers,
        json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
