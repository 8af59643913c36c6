"""Builds the bigram table of a model from public text.

    python -m speculation.bigrams --model MODEL --text FILE...

The model reads the texts. Its next-token probabilities are averaged for each token, and the eight
most likely successors kept, 3 bytes each. Users' conversations never go into the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from batching.cache import SequenceCache
from batching.errors import InvalidParameter
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import text_rows
from speculation.bigrams import N_NEXT, BigramTable, cached_file
from speculation.registry import BUNDLED_MODEL, resolve
from speculation.system.console import run_command
from speculation.system.files import read_text, require_distinct, require_writable


def collect(context: Context, texts: Iterable[Sequence[int]]) -> BigramTable:
    """Decode ``texts``, lists of token ids, and average the likely successors of every token.

    Each text is truncated to the context. Only the eight most likely tokens of each row count.
    """
    sums: dict[int, dict[int, float]] = {}
    counts: dict[int, int] = {}
    cache = SequenceCache(context)
    for text in texts:
        cache.truncate(0)
        tokens = list(text[: context.n_ctx])
        for start in range(0, len(tokens), context.n_batch):
            chunk = tokens[start : start + context.n_batch]
            output = context.decode(text_rows(chunk, start, [True] * len(chunk)))
            for row, token in enumerate(chunk):
                logits = output.logits(row)
                k = min(N_NEXT, len(logits))
                top = np.argpartition(logits, -k)[-k:]
                peak = logits.max()
                shares = np.exp(logits[top] - peak) / np.exp(logits - peak).sum()
                found = sums.setdefault(token, {})
                counts[token] = counts.get(token, 0) + 1
                for successor, p in zip(top.tolist(), shares.tolist(), strict=True):
                    found[successor] = found.get(successor, 0.0) + p
    context.seq_rm(-1, 0, -1)
    return BigramTable.from_sums(sums, counts, context.n_vocab)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    args = _parser().parse_args(arguments)
    return run_command(lambda: _make(args.model, args.text, args.out, args.max_tokens))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m speculation.bigrams",
        description="Build the table of likely next tokens that the method recycling starts from.",
    )
    parser.add_argument("--model", default=BUNDLED_MODEL, help="a GGUF or a name in models.txt")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="UTF-8 text files")
    parser.add_argument("--out", type=Path, help="output file (default: in your cache folder)")
    parser.add_argument(
        "--max-tokens", type=int, default=200_000, help="tokens to read in all (200000)"
    )
    return parser


def _make(name: str, files: Sequence[Path], out: Path | None, max_tokens: int) -> None:
    """Write the table to ``out`` or into the cache.

    Raises InvalidParameter for unusable input before it loads the model.
    """
    if max_tokens < 1:
        raise InvalidParameter(f"--max-tokens is {max_tokens}; give 1 or more")
    if out is not None:
        require_distinct(out, files)
        require_writable(out)
    texts = [read_text(file) for file in files]
    if not any(text.strip() for text in texts):
        raise InvalidParameter(
            f"there is no text in {', '.join(map(str, files))}; give files that contain text"
        )
    target = resolve(name)
    if out is not None:
        require_distinct(out, [target])
    with Model(target) as model, Context(model, ContextParams(n_ctx=512)) as context:
        if out is None:
            out = cached_file(model)
            out.parent.mkdir(parents=True, exist_ok=True)
            require_writable(out)
        table = collect(context, _sequences(model, texts, context.n_ctx, max_tokens))
        table.save(out, model.n_vocab)
    print(f"{out}: {out.stat().st_size:,} bytes")


def _sequences(
    model: Model, texts: Sequence[str], length: int, max_tokens: int
) -> Iterable[list[int]]:
    """The tokens of ``texts`` in sequences of up to ``length``, ``max_tokens`` in all."""
    n_left = max_tokens
    for text in texts:
        tokens = model.tokenize(text, parse_special=True)
        for start in range(0, len(tokens), length):
            if n_left <= 0:
                return
            sequence = tokens[start : start + min(length, n_left)]
            n_left -= len(sequence)
            yield sequence


if __name__ == "__main__":
    sys.exit(main())
