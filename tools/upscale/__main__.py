"""The upscaling tool from flags to exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from batching.errors import SpeculationError
from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.console import replace_unencodable
from speculation.system.files import require_writable
from tools.upscale.gguf_file import TYPES, Source, write_upscaled
from tools.upscale.shape import UpscaleError

OK, FAILED, INTERRUPTED = 0, 2, 130

DESCRIPTION = """\
Write a function-preserving upscaling of a Llama-architecture GGUF: a wider and deeper model with
the same logits, hence the same texts and the same accepted drafts, at the cost of its new size.

It is for measuring what speculative decoding gains when rows cost what they cost in a large model.
It is no larger model: it knows and writes exactly what the small one does.
"""

EPILOG = """\
examples
  python -m tools.upscale --width 2048 --layers 24 --type q8_0 --out big.gguf
      the bundled model at the cost of 1.2 billion parameters
  python -m speculation.bench --model big.gguf --methods prompt-lookup lookahead --limit 1
      what the methods gain at that cost

The logits are the same up to rounding, in the number format of --type: to compare texts, compare
with the source in the same format. Types with K (Q4_K and so on) mix several: write f16 and let
llama.cpp's llama-quantize make them of it. llama.cpp names a model by its size ("llama 1B"),
whatever is in it; the file's own name and description say what it is.

Memory: a few times the largest tensor. Exit code: 0, 2 after an error, 130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code. Errors end with one line on stderr."""
    replace_unencodable()
    args = _parser().parse_args(arguments)
    try:
        _upscale(args)
    except (SpeculationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    return OK


def _upscale(args: argparse.Namespace) -> None:
    out = Path(args.out)
    require_writable(out)
    if args.seed < 0:
        raise UpscaleError(f"--seed is {args.seed}; give 0 or more")
    path = resolve(args.model)
    if out.exists() and out.samefile(path):
        raise UpscaleError(f"--out {out} is the model itself; give another path")
    source = Source(path)
    to = source.shape.upscaled(args.width, args.layers, args.hidden)
    with tqdm(unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        write_upscaled(source, out, to, args.type, seed=args.seed, progress=progress)
    before = source.shape
    print(
        f"{out}: function-preserving upscaling of {source.name}\n"
        f"width {before.width} -> {to.width}, layers {before.layers} -> {to.layers}, "
        f"hidden {before.hidden} -> {to.hidden}, heads {before.heads} -> {to.heads}, "
        f"{args.type}, {out.stat().st_size / 2**20:,.0f} MiB"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.upscale",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        default=BUNDLED_MODEL,
        metavar="PATH|NAME",
        help=f"a GGUF file, or a name of models.txt ({BUNDLED_MODEL})",
    )
    parser.add_argument(
        "--width",
        type=int,
        metavar="D",
        help="width of the hidden state, a multiple of the head size (the model's own)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers (the model's own)")
    parser.add_argument(
        "--hidden",
        type=int,
        metavar="H",
        help="feed-forward units of a layer (in proportion to the width)",
    )
    parser.add_argument(
        "--type", choices=TYPES, default="f16", help="number format of the matrices (f16)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the random new weights (0)"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the GGUF to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
