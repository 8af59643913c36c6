"""Makes a trained decoder twice as deep, as a starting point for more training.

Every block is followed by a copy that has no effect yet: its matrices that write into the residual
stream are zero, so the logits are unchanged until training. Copies that each write half of the
original's output (after Du et al. 2024, "Stacking Your Transformers", arXiv 2405.15319) started at
a loss of 2.26 instead of 1.50 nats on the exercises, and were still 0.07 behind after 300,000
tokens.

    python -m tools.recipe.grow  --checkpoint DIR/checkpoint.pt --out RUN/checkpoint.pt
    python -m tools.recipe.train --extend --layers 16 --data DATA --out RUN
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from tools.recipe.export import load_decoder
from tools.recipe.model import Decoder
from tools.recipe.train import Schedule, start

WRITERS = ("attention.out.weight", "feed_forward.down.weight")  # into the residual stream


@torch.no_grad()
def deepen(decoder: Decoder) -> Decoder:
    """A decoder with twice as many blocks and the same logits."""
    deeper = Decoder(replace(decoder.shape, layers=2 * decoder.shape.layers))
    weights = {}
    for name, weight in decoder.state_dict().items():
        if not name.startswith("blocks."):
            weights[name] = weight
            continue
        _, block, of_block = name.split(".", 2)
        writes = of_block in WRITERS
        weights[f"blocks.{2 * int(block)}.{of_block}"] = weight
        weights[f"blocks.{2 * int(block) + 1}.{of_block}"] = 0 * weight if writes else weight
    deeper.load_state_dict(weights)
    return deeper


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a trained model twice as deep.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint to write")
    args = parser.parse_args()
    deeper = deepen(load_decoder(args.checkpoint))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run = start(deeper.shape, Schedule(), "cpu")  # with fresh optimizers
    run.model.load_state_dict(deeper.state_dict())
    run.save(args.out)


if __name__ == "__main__":
    main()
