"""Writes the training mix as plain text in the chat format, to build the bigram table from.

python -m tools.recipe.text --data DIR --tokenizer RUN/tokenizer.model --out text.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.recipe import corpus as corpora
from tools.recipe.rows import Mix, RowSource
from tools.recipe.tokenizer import Tokenizer

ROWS, TIME = 8, 512


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the training mix as text.")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz sources")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=400_000, help="approximate number of tokens")
    parser.add_argument("--seed", type=int, default=2, help="different from the training's seed")
    args = parser.parse_args()
    tokenizer = Tokenizer(args.tokenizer)
    training, _ = corpora.load(args.data)
    source = RowSource(training, tokenizer, Mix(copies=0.0, prose=0.2, dialogues=0.2), args.seed)
    with args.out.open("w", encoding="utf-8") as file:
        for step in range(-(-args.tokens // (ROWS * TIME))):
            for row in source.batch(step, ROWS, TIME).tokens:
                file.write(tokenizer.text(row.tolist()) + "\n")


if __name__ == "__main__":
    main()
