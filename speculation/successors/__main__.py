"""Make the successor table of a model from public text.

    python -m speculation.successors --model MODEL --text FILE...

The model reads the texts; for every token the successors that it thought likely there are averaged,
and the eight likeliest kept, 3 bytes each. What users write never goes into the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from batching.cache import SequenceCache
from batching.context import Context, ContextParams
from batching.errors import SpeculationError
from batching.model import Model
from batching.rows import Rows
from speculation.drafters.recycling import N_SUCCESSORS, SuccessorTable
from speculation.registry import DEFAULT_MODEL, resolve
from speculation.successors import cached_file


def collect(context: Context, texts: Iterable[Sequence[int]]) -> SuccessorTable:
    """Read ``texts``, lists of token ids, and keep the likeliest successors of every token.

    Each text is cut where the context ends. The probabilities of a row's eight likeliest tokens are
    summed over all rows of the same token.
    """
    sums: dict[int, dict[int, float]] = {}
    counts: dict[int, int] = {}
    cache = SequenceCache(context)
    for text in texts:
        cache.truncate(0)
        tokens = list(text[: context.n_ctx])
        for start in range(0, len(tokens), context.n_batch):
            chunk = tokens[start : start + context.n_batch]
            n = len(chunk)
            output = context.decode(
                Rows(chunk, range(start, start + n), [range(1)] * n, [True] * n)
            )
            for row, token in enumerate(chunk):
                logits = output.logits(row)
                k = min(N_SUCCESSORS, len(logits))
                top = np.argpartition(logits, -k)[-k:]
                peak = logits.max()
                shares = np.exp(logits[top] - peak) / np.exp(logits - peak).sum()
                found = sums.setdefault(token, {})
                counts[token] = counts.get(token, 0) + 1
                for successor, p in zip(top.tolist(), shares.tolist(), strict=True):
                    found[successor] = found.get(successor, 0.0) + p
    context.seq_rm(-1, 0, -1)
    return SuccessorTable.of_sums(sums, counts, context.n_vocab)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m speculation.successors",
        description="Make the successor table that method recycling starts with.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF, or a name of models.txt")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="UTF-8 text files")
    parser.add_argument("--out", type=Path, help="file to write (in the user's cache directory)")
    parser.add_argument("--max-tokens", type=int, default=200_000, help="tokens read in all")
    args = parser.parse_args(arguments)
    try:
        with (
            Model(resolve(args.model)) as model,
            Context(model, ContextParams(n_ctx=512)) as context,
        ):
            table = collect(context, _pieces(model, args.text, context.n_ctx, args.max_tokens))
            out = args.out or cached_file(model)
            out.parent.mkdir(parents=True, exist_ok=True)
            table.save(out, model.n_vocab)
    except (SpeculationError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


def _pieces(model: Model, files: Sequence[Path], length: int, most: int) -> Iterable[list[int]]:
    left = most
    for file in files:
        tokens = model.tokenize(file.read_text(encoding="utf-8"), parse_special=True)
        for start in range(0, len(tokens), length):
            if left <= 0:
                return
            piece = tokens[start : start + min(length, left)]
            left -= len(piece)
            yield piece


if __name__ == "__main__":
    sys.exit(main())
