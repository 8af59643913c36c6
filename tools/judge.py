"""Tables ``auto`` beside plain decoding and the best single method, over many runs of the bench.

    python -m speculation.bench --methods ar suffix auto --json run-1.json
    python -m tools.judge run-*.json

The first table has a row a model: ``auto`` over plain decoding by all seconds, the mean of prompts
in brackets, then over the method that is best there. Runs of the same model and prompts count as
repetitions; figures are medians over them. Let each start with an empty cache (``XDG_CACHE_HOME``),
or what one run learns is known to the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from speculation.drafter import BASELINE

AUTO, ALL = "auto", "all"
Ratios = dict[str, dict[str, list[float]]]  # plain, mean or single; category; one a repetition


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="written by the bench with --json")
    found: dict[str, Ratios] = {}
    for path in parser.parse_args(arguments).files:
        document = json.loads(path.read_text(encoding="utf-8"))
        name = f"{Path(document['model']['file']).stem}, {document['settings']['prompts']}"
        add_ratios(found.setdefault(name, {}), document["summary"])
    print(table(found))


def add_ratios(ratios: Ratios, summary: Sequence[Mapping[str, Any]]) -> None:
    """Add those of one run, by category, from the bench's summary."""
    by_category: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in summary:
        by_category.setdefault(row["category"], {})[row["method"]] = row
    for category, rows in by_category.items():
        own = rows[AUTO]
        if rows[BASELINE]["tokens_per_second"] and own["speed_up_mean"]:
            best = max(row["tokens_per_second"] for name, row in rows.items() if name != AUTO)
            for kind, value in (
                ("plain", own["speed_up_overall"]),
                ("mean", own["speed_up_mean"]),
                ("single", own["tokens_per_second"] / best),
            ):
                ratios.setdefault(kind, {}).setdefault(category, []).append(value)


def table(found: Mapping[str, Ratios]) -> str:
    """Markdown: a row a model, then a row a category."""
    models = {
        model: {
            kind: {name: median(values) for name, values in by_category.items()}
            for kind, by_category in ratios.items()
        }
        for model, ratios in found.items()
    }
    lines = ["| model | over plain | lowest | over best single | lowest |", "|---|---|---|---|---|"]
    for model, of in models.items():
        plain, single = of["plain"], of["single"]
        lines.append(
            f"| {model} | {plain[ALL]:.2f} ({of['mean'][ALL]:.2f}) | {_lowest(plain)} "
            f"| {single[ALL]:.2f} | {_lowest(single)} |"
        )
    lines += ["", f"| over plain (best single) | {' | '.join(models)} |"]
    lines.append("|---" * (len(models) + 1) + "|")
    for category in dict.fromkeys(name for of in models.values() for name in of["plain"]):
        cells = [
            f"{of['plain'][category]:.2f} ({of['single'][category]:.2f})"
            if category in of["plain"]
            else "–"
            for of in models.values()
        ]
        lines.append(f"| {category} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _lowest(values: Mapping[str, float]) -> str:
    category = min(values, key=values.__getitem__)
    return f"{values[category]:.2f} {category}"


if __name__ == "__main__":
    main()
