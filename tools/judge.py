"""Tables how ``auto`` does beside plain decoding and the best single method, over many runs.

    python -m speculation.bench --methods ar prompt-lookup suffix auto --json runs/smollm2-1.json
    python -m tools.judge runs/*.json

Runs of the same model and methods count as repetitions; every figure is the median over them. Let
each start with an empty cache (``XDG_CACHE_HOME``), or what one run learns is known to the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from speculation.bench.json_file import read_json
from speculation.bench.results import Run
from speculation.bench.summary import ALL, speed_ups, tokens_per_second
from speculation.drafter import BASELINE

AUTO = "auto"
N_FIRST = 10  # replies that count as a model's first ones


@dataclass(frozen=True)
class Figures:
    """One model's figures. Speeds are all tokens over all seconds, except ``mean``.

    plain   by category and over all: ``auto`` over plain decoding
    mean    the same, as the mean of the prompts' own ratios
    single  by category and over all: ``auto`` over the single method that is best there
    first   ``auto`` over plain decoding for each of the first replies
    together  the same for these replies together
    reliability  by category, over all and for the first replies: tokens that ``auto`` drafted,
            expected to be accepted, and saw accepted
    """

    plain: Mapping[str, float]
    mean: Mapping[str, float]
    single: Mapping[str, float]
    first: Sequence[float]
    together: float
    reliability: Mapping[str, tuple[float, float, float]]


def figures(repetitions: Sequence[Sequence[Run]]) -> Figures:
    """The medians over ``repetitions`` of the same prompts and methods."""
    every = [_figures(runs) for runs in repetitions]
    return Figures(
        _medians(one.plain for one in every),
        _medians(one.mean for one in every),
        _medians(one.single for one in every),
        [median(values) for values in zip(*(one.first for one in every), strict=True)],
        median(one.together for one in every),
        {
            key: (sum(drafted), sum(expected), sum(accepted))
            for key in every[0].reliability
            for drafted, expected, accepted in [
                zip(*(one.reliability[key] for one in every), strict=True)
            ]
        },
    )


def _figures(runs: Sequence[Run]) -> Figures:
    plain, mean, single = {}, {}, {}
    for category in [*dict.fromkeys(run.category for run in runs), ALL]:
        by_method: dict[str, list[Run]] = {}
        for run in runs:
            if category in (run.category, ALL):
                by_method.setdefault(run.method, []).append(run)
        speeds = {method: tokens_per_second(some) for method, some in by_method.items()}
        ratios = speed_ups(by_method[AUTO], by_method[BASELINE])
        if speeds[BASELINE] and ratios:
            others = [speed for method, speed in speeds.items() if method != AUTO]
            plain[category] = speeds[AUTO] / speeds[BASELINE]
            single[category] = speeds[AUTO] / max(others)
            mean[category] = sum(ratios) / len(ratios)
    autos = [run for run in runs if run.method == AUTO][:N_FIRST]
    bases = [run for run in runs if run.method == BASELINE][:N_FIRST]
    return Figures(
        plain,
        mean,
        single,
        [
            a.stats.tokens_per_second / b.stats.tokens_per_second
            if a.stats.tokens_per_second and b.stats.tokens_per_second
            else 1.0  # ended in the first step, whose time does not count
            for a, b in zip(autos, bases, strict=True)
        ],
        tokens_per_second(autos) / tokens_per_second(bases),
        _reliability([run for run in runs if run.method == AUTO]),
    )


def _reliability(runs: Sequence[Run]) -> dict[str, tuple[float, float, float]]:
    groups = {
        category: [run.stats for run in runs if category in (run.category, ALL)]
        for category in [*dict.fromkeys(run.category for run in runs), ALL]
    }
    groups[f"first {N_FIRST}"] = [run.stats for run in runs[:N_FIRST]]
    return {
        name: (
            sum(stats.n_drafted for stats in some),
            sum(stats.n_expected for stats in some),
            sum(stats.n_accepted for stats in some),
        )
        for name, some in groups.items()
    }


def _medians(every: Iterable[Mapping[str, float]]) -> dict[str, float]:
    rows = list(every)
    return {key: median(row[key] for row in rows) for key in rows[0]}


def table(by_model: Mapping[str, Figures]) -> str:
    """Markdown tables: a row a model, a row a category, and how many drafts came true in each."""
    lines = [
        "| model | over plain: all (mean) | lowest | over best single: all | lowest | "
        f"first {N_FIRST} | lowest |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, f in by_model.items():
        lines.append(
            f"| {model} | {f.plain[ALL]:.2f} ({f.mean[ALL]:.2f}) | {_lowest(f.plain)} | "
            f"{f.single[ALL]:.2f} | {_lowest(f.single)} | {f.together:.2f} | "
            f"{min(f.first, default=1.0):.2f} |"
        )
    categories = dict.fromkeys(key for f in by_model.values() for key in f.plain)
    lines += ["", f"| over plain (best single) | {' | '.join(by_model)} |"]
    lines.append("|---" * (len(by_model) + 1) + "|")
    for category in categories:
        cells = [
            f"{f.plain[category]:.2f} ({f.single[category]:.2f})" if category in f.plain else "–"
            for f in by_model.values()
        ]
        lines.append(f"| {category} | " + " | ".join(cells) + " |")
    lines += ["", f"| accepted of expected (drafted) | {' | '.join(by_model)} |"]
    lines.append("|---" * (len(by_model) + 1) + "|")
    for group in dict.fromkeys(key for f in by_model.values() for key in f.reliability):
        rows = [f.reliability.get(group, (0.0, 0.0, 0.0)) for f in by_model.values()]
        cells = [f"{done:.0f} of {hoped:.0f} ({drafted:.0f})" for drafted, hoped, done in rows]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _lowest(values: Mapping[str, float]) -> str:
    category = min(values, key=values.__getitem__)
    return f"{values[category]:.2f} {category}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.judge", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="written by the bench with --json")
    files = parser.parse_args(arguments).files
    repetitions: dict[str, list[Sequence[Run]]] = {}
    for path in files:
        results = read_json(path)
        name = f"{Path(results.model['file']).stem}, {results.settings['prompts']}"
        repetitions.setdefault(name, []).append(results.runs)
    print(table({name: figures(runs) for name, runs in repetitions.items()}))


if __name__ == "__main__":
    main()
