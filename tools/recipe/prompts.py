"""Writes prompts for `python -m speculation.train --generate`: what users ask, without replies.

For heads and draft models of other models than the one this recipe makes. Half of the prompts are
free requests (`wishes`); the others ask about, summarise, rewrite or continue a text.

    python -m tools.recipe.prompts --data DIR --out prompts.jsonl --prompts 3000
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tools.recipe import corpus as corpora
from tools.recipe import wishes
from tools.recipe.tasks import TASKS, Draw
from tools.recipe.tasks.draw import Task

KINDS: dict[str, tuple[float, Task]] = {
    "wish": (50, wishes.wish),
    **{
        name: (weight, TASKS[name][1])
        for name, weight in (
            ("abstract", 10), ("meeting", 4), ("background", 8), ("factbook", 6), ("problem", 8),
            ("story_facts", 3), ("extract", 3), ("bullet_points", 2), ("split_or_join", 2),
            ("continue_text", 2), ("story", 2), ("write_code", 2), ("edit_code", 2),
            ("dictionary", 2), ("chatter", 2),
        )
    },
}  # fmt: skip
MAX_CHARACTERS = 2400  # of a chat's turns together


def turns(draw: Draw) -> list[str]:
    """The user's turns of a random chat."""
    weights = [weight for weight, _ in KINDS.values()]
    _, make = draw.rng.choices(list(KINDS.values()), weights)[0]
    found = [text for role, text in make(draw) if role == "user"]
    return found if sum(map(len, found)) <= MAX_CHARACTERS else turns(draw)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw prompts for a target to reply to.")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz sources")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    training, _ = corpora.load(args.data)
    with args.out.open("w", encoding="utf-8") as file:
        for index in range(args.prompts):
            draw = Draw(training, random.Random(f"prompts/{args.seed}/{index}"))
            file.write(json.dumps({"turns": turns(draw)}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
