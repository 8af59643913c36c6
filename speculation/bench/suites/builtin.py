"""The default suite: compares methods on prompts, with their speed-ups and phase times."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

from speculation.bench.report import by_category, tables
from speculation.bench.results import Results
from speculation.bench.suites.suite import Suite
from speculation.bench.summary import ALL, Row, summarise
from speculation.bench.table import Table
from speculation.drafter import BASELINE
from speculation.settings import DEFAULT_METHOD
from speculation.stats import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 16  # of a histogram; the last one counts all steps with more tokens


class Builtin(Suite):
    """The default suite: tables by category, then the differing texts."""

    name = "builtin"
    title = "comparison of methods on the prompts"
    methods: Sequence[str] = (BASELINE, DEFAULT_METHOD, "prompt-lookup")

    def tables(self, results: Results) -> list[Table]:
        return tables(summarise(results.runs))

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        rows = summarise(results.runs)
        overall = [row for row in rows if row.category == ALL]
        return [
            (
                "speed-up",
                "Speed-up over plain decoding (dashed line) on the same prompt: mean and standard "
                "deviation over the prompts of a category.",
                _speed_ups(by_category(rows)),
            ),
            (
                "tokens-per-step",
                "Tokens per step: share of the steps, all prompts together. Plain decoding always "
                "makes one token per step.",
                _tokens_per_step([row for row in overall if row.method != BASELINE]),
            ),
            (
                "phases",
                "Time by phase, all prompts together. Left: per generated token. Right: per step, "
                "without llama.cpp's decode.",
                _phases(overall),
            ),
        ]


def _speed_ups(blocks: Sequence[Sequence[Row]]) -> Figure:
    """Bars grouped by category, one colour per method."""
    from speculation.bench.plots import colours, subplots

    methods = [row.method for row in blocks[-1] if row.method != BASELINE]
    if not methods:
        methods = [BASELINE]
    colour = colours([BASELINE, *methods])
    thick = 0.8 / len(methods)
    figure, ((ax,),) = subplots(height=1.1 + len(blocks) * (0.16 + 0.2 * len(methods)))
    for i, method in enumerate(methods):
        rows = [next(row for row in block if row.method == method) for block in blocks]
        ax.barh(
            [n + (i - (len(methods) - 1) / 2) * thick for n in range(len(blocks))],
            [row.speed_up_mean for row in rows],
            xerr=[nan if row.speed_up_std is None else row.speed_up_std for row in rows],
            height=0.9 * thick,
            color=colour[method],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#444444"},
            label=method,
        )
    ax.axvline(1.0, color=colour[BASELINE], linestyle="--", linewidth=1.2)
    names = [block[0].category for block in blocks]
    ax.set_yticks(range(len(blocks)), ["all categories" if n == ALL else n for n in names])
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel("speed-up over plain decoding")
    ax.margins(x=0.04)
    ax.grid(axis="y", visible=False)
    wide = any(len(method) > 24 for method in methods)
    figure.legend(loc="outside upper left", ncols=min(2 if wide else 5, len(methods)))
    return figure


def _tokens_per_step(rows: Sequence[Row]) -> Figure:
    """One histogram per method, stacked vertically on a shared axis."""
    from speculation.bench.plots import colours, subplots

    if not rows:
        figure, _ = subplots(height=1.0)
        return figure
    colour = colours([BASELINE, *(row.method for row in rows)])
    n_bars = min(MAX_BARS, max(2, *(max(row.tokens_histogram, default=1) for row in rows)))
    figure, axes = subplots(n_rows=len(rows), height=0.7 + 1.15 * len(rows), sharex=True)
    for (ax,), row in zip(axes, rows, strict=True):
        shares = _shares(row, n_bars)
        bars = ax.bar(range(1, n_bars + 1), shares, width=0.8, color=colour[row.method])
        ax.bar_label(
            bars,
            [f"{share:.0f}%" if share >= 0.5 else "<1%" if share > 0 else "" for share in shares],
            padding=1,
            fontsize=8,
            color="#444444",
        )
        ax.set_ylim(0, 1.3 * max(shares))
        ax.set_yticks([])
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
        ax.set_title(
            f"{row.method}: {row.tokens_per_step:.2f} tokens per step on average", fontsize=9.5
        )
    last = axes[-1][0]
    labels = [str(n) for n in range(1, n_bars + 1)]
    labels[-1] += "+" if n_bars == MAX_BARS else ""
    last.set_xticks(range(1, n_bars + 1), labels)
    last.set_xlabel("tokens per step")
    return figure


def _shares(row: Row, n_bars: int) -> list[float]:
    """Percentage of the steps with 1, 2, …, ``n_bars`` or more tokens."""
    counts = [0] * n_bars
    for n, count in row.tokens_histogram.items():
        counts[min(n, n_bars) - 1] += count
    total = max(1, sum(counts))
    return [100 * count / total for count in counts]


def _phases(rows: Sequence[Row]) -> Figure:
    """Time by phase: per token with all phases, and per step without the decode."""
    from speculation.bench.plots import PHASE_COLOURS, subplots

    lines = max(1 + row.method.count(",") for row in rows)
    height = 1.3 + max(0.34, 0.16 * lines) * len(rows)
    figure, axes = subplots(n_columns=2, height=height, sharey=True)
    left, right = axes[0]
    of_token = [[1e3 * s / row.tokens_per_step for s in _parts(row)] for row in rows]
    of_step = [[1e6 * s for s in _parts(row)] for row in rows]
    names = [*PHASES, "loop"]
    _stack(left, of_token, names, PHASE_COLOURS)
    outside = [i for i, name in enumerate(names) if name != "decode"]
    _stack(
        right,
        [[values[i] for i in outside] for values in of_step],
        [names[i] for i in outside],
        PHASE_COLOURS,
    )
    labels = [row.method.replace(",", ",\n") for row in rows]
    left.set_yticks(range(len(rows)), labels, fontsize=8.5)
    left.invert_yaxis()
    left.set_xlabel("ms per generated token")
    right.set_xlabel("µs per step outside decode")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=len(names))
    return figure


def _parts(row: Row) -> list[float]:
    """Seconds per step by phase, then those of the loop around the phases."""
    phases = [row.phase_seconds[phase] for phase in PHASES]
    rest = row.outside_decode_seconds - sum(phases) + row.phase_seconds["decode"]
    return [*phases, max(0.0, rest)]


def _stack(
    ax: Axes, values: Sequence[Sequence[float]], names: Sequence[str], colour: dict[str, str]
) -> None:
    """Stacked bars: ``values[row][part]``."""
    start = [0.0] * len(values)
    for part, name in enumerate(names):
        widths = [row[part] for row in values]
        ax.barh(range(len(values)), widths, left=start, height=0.62, color=colour[name], label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    ax.set_xlim(0, 1.04 * max(start))
    ax.grid(axis="y", visible=False)
