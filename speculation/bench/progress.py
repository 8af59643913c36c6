"""The progress bar on stderr: completed runs, and the fastest method so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from speculation.bench.results import Run
from speculation.drafter import BASELINE


class Progress:
    """A bar over ``total`` measurements, updated every 30 seconds if stderr is not a terminal."""

    def __init__(self, total: int) -> None:
        live = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            unit="run",
            file=sys.stderr,
            dynamic_ncols=live,
            ascii=not live,
            mininterval=0.1 if live else 30,
        )
        self._totals: dict[str, tuple[int, float]] = {}  # tokens, seconds

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, runs: Sequence[Run]) -> None:
        """Count a round of runs."""
        for run in runs:
            tokens, seconds = self._totals.get(run.method, (0, 0.0))
            tokens += run.stats.n_tokens - run.stats.n_first
            self._totals[run.method] = tokens, seconds + run.stats.decode_seconds
        rates = {name: n / seconds for name, (n, seconds) in self._totals.items() if seconds}
        plain = rates.pop(BASELINE, 0.0)
        if plain and rates:
            best = max(rates, key=rates.__getitem__)
            text = f"fastest {best} {rates[best] / plain:.2f}x"
            self._bar.set_postfix_str(text, refresh=False)
        self.advance(runs[0].prompt_id, len(runs))

    def advance(self, what: str, n: int = 1) -> None:
        """Count completed measurements."""
        self._bar.set_description_str(what, refresh=False)
        self._bar.update(n)

    def skip(self, n_runs: int, reason: str) -> None:
        """Remove ``n_runs`` from the total and print why."""
        self._bar.total -= n_runs
        tqdm.write(reason, file=sys.stderr)
