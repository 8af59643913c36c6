"""Statistics over runs: one row for each category and method. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import TypeVar

from speculation.bench.results import Run
from speculation.drafter import BASELINE
from speculation.meter import PHASES, rate

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
    for category in [*dict.fromkeys(run.category for run in runs), ALL]:
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
    every = [run.stats for run in runs]
    return rate(
        sum(stats.n_tokens for stats in every),
        sum(stats.n_first for stats in every),
        sum(stats.decode_seconds for stats in every),
    )


def _row(category: str, runs: Sequence[Run], baseline: Sequence[Run]) -> Row:
    ratios = speed_ups(runs, baseline)
    every = [run.stats for run in runs]
    n_steps = sum(stats.n_steps for stats in every)
    n_timed = max(1, n_steps - len(runs))
    n_drafted = sum(stats.n_drafted for stats in every)
    phases = {
        phase: sum(stats.phase_seconds[phase] for stats in every) / n_timed for phase in PHASES
    }
    speed, plain = tokens_per_second(runs), tokens_per_second(baseline)
    return Row(
        category=category,
        method=runs[0].method,
        n_prompts=len({run.prompt_id for run in runs}),
        n_runs=len(runs),
        n_different=sum(run.first_difference is not None for run in runs),
        tokens_per_second=speed,
        speed_up_mean=mean(ratios) if ratios else 0.0,
        speed_up_std=stdev(ratios) if len(ratios) > 1 else None,
        speed_up_overall=speed / plain if plain else 0.0,
        tokens_per_step=sum(stats.n_tokens for stats in every) / n_steps,
        acceptance_rate=sum(stats.n_accepted for stats in every) / n_drafted if n_drafted else None,
        prefill_seconds=mean(stats.prefill_seconds for stats in every),
        phase_seconds=phases,
        outside_decode_seconds=(
            sum(stats.decode_seconds for stats in every) / n_timed - phases["decode"]
        ),
        rows_histogram=_total(stats.rows_histogram for stats in every),
        tokens_histogram=_total(stats.tokens_histogram for stats in every),
        accepted_by_source=_total(stats.accepted_by_source for stats in every),
    )


def _total(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """The sum of several counts by key."""
    summed: Counter[Key] = Counter()
    for count in counts:
        summed.update(count)
    return dict(summed)


def _medians(runs: Iterable[Run]) -> dict[str, float]:
    """Median tokens per second over the repeats of each prompt."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run.prompt_id, []).append(run.stats.tokens_per_second)
    return {prompt_id: median(values) for prompt_id, values in rates.items()}
