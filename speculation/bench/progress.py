"""The progress bar on stderr: completed runs, and the fastest method so far."""

from __future__ import annotations

import sys

from tqdm import tqdm

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

    def add(self, method: str, prompt_id: str, n_tokens: int, seconds: float) -> None:
        """Count a completed run, which made ``n_tokens`` in ``seconds``."""
        tokens, total = self._totals.get(method, (0, 0.0))
        self._totals[method] = (tokens + n_tokens, total + seconds)
        rates = {name: n / seconds for name, (n, seconds) in self._totals.items() if seconds}
        plain = rates.pop(BASELINE, 0.0)
        if plain and rates:
            best = max(rates, key=rates.__getitem__)
            text = f"fastest {best} {rates[best] / plain:.2f}x"
            self._bar.set_postfix_str(text, refresh=False)
        self.advance(prompt_id)

    def advance(self, what: str) -> None:
        """Count a completed measurement."""
        self._bar.set_description_str(what, refresh=False)
        self._bar.update()

    def skip(self, n_runs: int, reason: str) -> None:
        """Remove ``n_runs`` from the total and print why."""
        self._bar.total -= n_runs
        tqdm.write(reason, file=sys.stderr)
