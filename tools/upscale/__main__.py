"""``python -m tools.upscale``: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.console import run_command
from speculation.system.files import require_writable
from tools.upscale.gguf_file import TYPES, Source, write_upscaled
from tools.upscale.shape import UpscaleError

DESCRIPTION = """\
Write a function-preserving upscaling of a Llama-architecture GGUF: a wider and deeper model with
the same logits, and so the same texts and accepted drafts, at the cost of its new size.

Use it to measure the speed-up of speculative decoding at a large model's cost per row. It does not
make the model better: it knows and writes exactly what the small one does.
"""

EPILOG = """\
examples
  python -m tools.upscale --width 2048 --layers 24 --type q8_0 --out big.gguf
      the bundled model at the cost of 1.2 billion parameters
  python -m speculation.bench --model big.gguf --methods prompt-lookup lookahead --limit 1
      what the methods gain at that cost

The logits are equal up to rounding in --type; to compare texts, use the source in the same type.
For K-quants (Q4_K and so on), write f16 and convert it with llama.cpp's llama-quantize. llama.cpp
names a model by its size ("llama 1B"); the file's name and description say what it really is.

Memory use: a few times the largest tensor. Exit code: 0, 2 after an error, 130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    args = _parser().parse_args(arguments)
    return run_command(lambda: _upscale(args))


def _upscale(args: argparse.Namespace) -> None:
    out = Path(args.out)
    require_writable(out)
    path = resolve(args.model)
    if out.exists() and out.samefile(path):
        raise UpscaleError(f"--out {out} is the model itself; give another path")
    source = Source(path)
    to = source.shape.upscaled(args.width, args.layers)
    with tqdm(unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        write_upscaled(source, out, to, args.type, progress)
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
        help=f"a GGUF file or a name in models.txt ({BUNDLED_MODEL})",
    )
    parser.add_argument(
        "--width",
        type=int,
        metavar="D",
        help="width of the hidden state, a multiple of the head size (unchanged)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers (unchanged)")
    parser.add_argument(
        "--type", choices=TYPES, default="f16", help="tensor type of the matrices (f16)"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="GGUF file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
