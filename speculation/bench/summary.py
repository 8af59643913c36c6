"""Statistics over runs: one row for each category and method. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import TypeVar

from speculation.bench.results import Run
from speculation.drafter import BASELINE
from speculation.stats import PHASES, rate

ALL = "all"
Key = TypeVar("Key")


@dataclass(frozen=True)
class Row:
    """One method on the prompts of one category, or on all of them (category ``all``).

    n_prompts                 turns measured; each counts as a prompt
    n_different               runs whose text differs from plain decoding's
    tokens_per_second         tokens after the first step over decode seconds, of all runs
    speed_up_mean             mean over prompts of the speed-up: median tokens per second over the
                              repeats, relative to plain decoding's. Prompts whose replies ended in
                              the first step are excluded; 0 if that leaves none
    speed_up_std              their standard deviation (n - 1); None for a single prompt
    speed_up_overall          tokens_per_second relative to plain decoding's; 0 if that is 0
    acceptance_rate           accepted / drafted; None if nothing was drafted
    prefill_seconds           mean per run: the time to the first token
    phase_seconds             mean per step after the first, by phase
    outside_decode_seconds    mean per step after the first, outside ``llama_decode``
    rows_histogram            rows of a step -> number of steps, over all runs
    tokens_histogram          tokens of a step -> number of steps, over all runs
    accepted_by_source        draft source -> accepted tokens, over all runs
    """

    category: str
    method: str
    n_prompts: int
    n_runs: int
    n_different: int
    tokens_per_second: float
    speed_up_mean: float
    speed_up_std: float | None
    speed_up_overall: float
    tokens_per_step: float
    acceptance_rate: float | None
    prefill_seconds: float
    phase_seconds: Mapping[str, float]
    outside_decode_seconds: float
    rows_histogram: Mapping[int, int] = field(default_factory=dict)
    tokens_histogram: Mapping[int, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)


def summarise(runs: Sequence[Run]) -> list[Row]:
    """A row for each category and method in order of appearance, then the rows of ``all``."""
    rows = []
    for category in [*_unique(run.category for run in runs), ALL]:
        by_method: dict[str, list[Run]] = {}
        for run in runs:
            if category in (run.category, ALL):
                by_method.setdefault(run.method, []).append(run)
        rows += [_row(category, chosen, by_method[BASELINE]) for chosen in by_method.values()]
    return rows


def speed_ups(runs: Iterable[Run], baseline: Iterable[Run]) -> list[float]:
    """The speed-up of each prompt: median tokens per second over the baseline's median."""
    plain = _medians(baseline)
    return [
        value / plain[prompt_id]
        for prompt_id, value in _medians(runs).items()
        if value and plain[prompt_id]
    ]


def tokens_per_second(runs: Sequence[Run]) -> float:
    """Tokens after the first step over decode seconds, of all runs."""
    return rate(
        sum(len(run.tokens) for run in runs),
        sum(run.n_first for run in runs),
        sum(run.decode_seconds for run in runs),
    )


def _row(category: str, runs: Sequence[Run], baseline: Sequence[Run]) -> Row:
    ratios = speed_ups(runs, baseline)
    n_steps = sum(run.n_steps for run in runs)
    n_timed = max(1, n_steps - len(runs))
    n_drafted = sum(run.n_drafted for run in runs)
    phases = {phase: sum(run.phase_seconds[phase] for run in runs) / n_timed for phase in PHASES}
    speed, plain = tokens_per_second(runs), tokens_per_second(baseline)
    return Row(
        category=category,
        method=runs[0].method,
        n_prompts=len({run.prompt_id for run in runs}),
        n_runs=len(runs),
        n_different=sum(not run.same_as_ar for run in runs),
        tokens_per_second=speed,
        speed_up_mean=mean(ratios) if ratios else 0.0,
        speed_up_std=stdev(ratios) if len(ratios) > 1 else None,
        speed_up_overall=speed / plain if plain else 0.0,
        tokens_per_step=sum(len(run.tokens) for run in runs) / n_steps,
        acceptance_rate=sum(run.n_accepted for run in runs) / n_drafted if n_drafted else None,
        prefill_seconds=mean(run.prefill_seconds for run in runs),
        phase_seconds=phases,
        outside_decode_seconds=(
            sum(run.decode_seconds for run in runs) / n_timed - phases["decode"]
        ),
        rows_histogram=dict(sorted(total(run.rows_histogram for run in runs).items())),
        tokens_histogram=dict(sorted(total(run.tokens_histogram for run in runs).items())),
        accepted_by_source=total(run.accepted_by_source for run in runs),
    )


def total(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """The sum of several counts by key."""
    summed: Counter[Key] = Counter()
    for count in counts:
        summed.update(count)
    return dict(summed)


def _medians(runs: Iterable[Run]) -> dict[str, float]:
    """Median tokens per second over the repeats of each prompt."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run.prompt_id, []).append(run.tokens_per_second)
    return {prompt_id: median(values) for prompt_id, values in rates.items()}


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
