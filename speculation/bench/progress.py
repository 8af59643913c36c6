"""The progress bar on stderr: completed runs, and each method's speed-up so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from speculation.bench.results import Run
from speculation.drafter import BASELINE

MAX_SHOWN = 4


class Progress:
    """A bar over ``total`` runs, updated only every 30 seconds if stderr is not a terminal."""

    def __init__(self, total: int, done: int = 0, runs: Sequence[Run] = ()) -> None:
        """``done`` measurements and ``runs`` were completed before."""
        self._live = live = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done + len(runs),
            unit="run",
            file=sys.stderr,
            dynamic_ncols=live,
            ascii=not live,
            mininterval=0.1 if live else 30,
        )
        self._totals: dict[str, tuple[int, float]] = {}  # tokens, seconds
        for run in runs:
            self._count(run.method, len(run.tokens) - run.n_first, run.decode_seconds)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def add(self, method: str, prompt_id: str, n_tokens: int, seconds: float) -> None:
        """Count a completed run, which made ``n_tokens`` in ``seconds``."""
        self._count(method, n_tokens, seconds)
        self._bar.set_description_str(prompt_id, refresh=False)
        self._bar.set_postfix_str(self.running_speed_up(), refresh=False)
        self._bar.update()

    def advance(self, what: str) -> None:
        """Count a completed measurement that is not a run of a method."""
        self._bar.set_description_str(what, refresh=False)
        self._bar.update()

    def running_speed_up(self) -> str:
        """``prompt-lookup 1.85x, lookahead 0.62x``, from all tokens and seconds so far.

        With more than four methods, only the fastest.
        """
        plain = self._totals.get(BASELINE)
        if plain is None or not plain[0]:
            return ""
        rate = plain[0] / plain[1]
        ratios = {
            method: tokens / seconds / rate
            for method, (tokens, seconds) in self._totals.items()
            if method != BASELINE and seconds
        }
        if not ratios:
            return ""
        if len(ratios) > MAX_SHOWN:
            best = max(ratios, key=ratios.__getitem__)
            return f"best {best} {ratios[best]:.2f}x"
        return ", ".join(f"{method} {ratio:.2f}x" for method, ratio in ratios.items())

    def skip(self, n_runs: int, reason: str) -> None:
        """Remove ``n_runs`` from the total and print why."""
        self._bar.total -= n_runs
        tqdm.write(reason, file=sys.stderr)
        if self._live:
            self._bar.refresh()

    def _count(self, method: str, n_tokens: int, seconds: float) -> None:
        tokens, total = self._totals.get(method, (0, 0.0))
        self._totals[method] = (tokens + n_tokens, total + seconds)
