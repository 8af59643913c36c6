"""Statistics over runs: one row for each category and method. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import mean, median, stdev

from speculation.bench.results import Run
from speculation.drafter import BASELINE
from speculation.meter import PHASES, Stats

ALL = "all"


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


def _row(category: str, runs: Sequence[Run], baseline: Sequence[Run]) -> Row:
    own, plain = _medians(runs), _medians(baseline)
    ratios = [own[name] / plain[name] for name in own if own[name] and plain[name]]
    total, speed = _total(runs), _total(baseline).tokens_per_second
    n_timed = max(1, total.n_steps - len(runs))
    phases = {phase: total.phase_seconds[phase] / n_timed for phase in PHASES}
    return Row(
        category=category,
        method=runs[0].method,
        n_prompts=len(own),
        n_runs=len(runs),
        n_different=sum(run.first_difference is not None for run in runs),
        tokens_per_second=total.tokens_per_second,
        speed_up_mean=mean(ratios) if ratios else 0.0,
        speed_up_std=stdev(ratios) if len(ratios) > 1 else None,
        speed_up_overall=total.tokens_per_second / speed if speed else 0.0,
        tokens_per_step=total.tokens_per_step,
        acceptance_rate=total.acceptance_rate if total.n_drafted else None,
        prefill_seconds=total.prefill_seconds / len(runs),
        phase_seconds=phases,
        outside_decode_seconds=total.decode_seconds / n_timed - phases["decode"],
        rows_histogram=total.rows_histogram,
        tokens_histogram=total.tokens_histogram,
        accepted_by_source=total.accepted_by_source,
    )


def _total(runs: Sequence[Run]) -> Stats:
    """The sum of all runs' counters and times."""
    total = Stats()
    for field_ in fields(Stats):
        values = [getattr(run.stats, field_.name) for run in runs]
        if isinstance(values[0], Mapping):
            keys = dict.fromkeys(key for value in values for key in value)
            found = {key: sum(value.get(key, 0) for value in values) for key in keys}
            setattr(total, field_.name, found)
        else:
            setattr(total, field_.name, sum(values))
    return total


def _medians(runs: Sequence[Run]) -> dict[str, float]:
    """Median tokens per second over the repeats of each prompt."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run.prompt_id, []).append(run.stats.tokens_per_second)
    return {prompt_id: median(values) for prompt_id, values in rates.items()}
