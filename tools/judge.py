"""Tables ``auto`` beside plain decoding and the best single method, over many runs of the bench.

    python -m speculation.bench --methods ar suffix auto --json run-1.json
    python -m tools.judge run-*.json

Runs of the same model and prompts count as repetitions; figures are medians over them. Let each
start with an empty cache (``XDG_CACHE_HOME``), or what one run learns is known to the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from speculation.drafter import BASELINE

AUTO = "auto"
Ratios = tuple[float, float, float]  # over plain by all seconds, mean of prompts, over best single


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="written by the bench with --json")
    found: dict[tuple[str, str], list[Ratios]] = {}
    for path in parser.parse_args(arguments).files:
        document = json.loads(path.read_text(encoding="utf-8"))
        name = f"{Path(document['model']['file']).stem}, {document['settings']['prompts']}"
        for category, ratios in ratios_of(document["summary"]).items():
            found.setdefault((name, category), []).append(ratios)
    print(table(found))


def ratios_of(summary: Sequence[Mapping[str, Any]]) -> dict[str, Ratios]:
    """Those of one run, by category, from the bench's summary. Categories whose replies all ended
    in the first step have none."""
    found = {}
    for own in (row for row in summary if row["method"] == AUTO and row["speed_up_mean"]):
        speeds = {
            row["method"]: row["tokens_per_second"]
            for row in summary
            if row["category"] == own["category"] and row["method"] != AUTO
        }
        if speeds[BASELINE]:
            over_best = own["tokens_per_second"] / max(speeds.values())
            found[own["category"]] = (own["speed_up_overall"], own["speed_up_mean"], over_best)
    return found


def table(found: Mapping[tuple[str, str], Sequence[Ratios]]) -> str:
    """Markdown: a row for each model and category."""
    lines = ["| model | prompts | over plain | mean | over best single |", "|---|---|---|---|---|"]
    for (model, category), runs in found.items():
        cells = [f"{median(values):.2f}" for values in zip(*runs, strict=True)]
        lines.append(f"| {model} | {category} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
