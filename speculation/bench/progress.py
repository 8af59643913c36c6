"""The progress bar on stderr: completed runs, and the fastest method so far."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from speculation.drafter import BASELINE


def bar(total: int, unit: str) -> tqdm[Any]:
    """A bar on stderr, updated only every 30 seconds if that is not a terminal."""
    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        unit=unit,
        file=sys.stderr,
        dynamic_ncols=live,
        ascii=not live,
        mininterval=0.1 if live else 30,
    )


class Progress:
    """A bar over ``total`` measurements."""

    def __init__(self, total: int) -> None:
        self._bar = bar(total, "run")
        self._totals: dict[str, tuple[int, float]] = {}  # tokens, seconds

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, method: str, prompt_id: str, n_tokens: int, seconds: float) -> None:
        """Count a completed run, which made ``n_tokens`` in ``seconds``."""
        tokens, total = self._totals.get(method, (0, 0.0))
        self._totals[method] = (tokens + n_tokens, total + seconds)
        self._bar.set_postfix_str(self._fastest(), refresh=False)
        self.advance(prompt_id)

    def advance(self, what: str) -> None:
        """Count a completed measurement."""
        self._bar.set_description_str(what, refresh=False)
        self._bar.update()

    def skip(self, n_runs: int, reason: str) -> None:
        """Remove ``n_runs`` from the total and print why."""
        self._bar.total -= n_runs
        tqdm.write(reason, file=sys.stderr)

    def _fastest(self) -> str:
        """``fastest prompt-lookup 1.85x``, from all tokens and seconds so far."""
        rates = {method: n / seconds for method, (n, seconds) in self._totals.items() if seconds}
        plain = rates.pop(BASELINE, 0.0)
        if not plain or not rates:
            return ""
        best = max(rates, key=rates.__getitem__)
        return f"fastest {best} {rates[best] / plain:.2f}x"
