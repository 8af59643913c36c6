"""Formats the comparison as a table and text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from speculation.bench.table import Table
from tools.compare.pairs import Comparison, Failure

TITLE = "ours ÷ llama.cpp's own programs"
NOTE = """\
ratio: our tokens/s over theirs after the first token, median of the pairs (minimum to maximum);
same text: pairs with equal texts. Same GGUF, prompts and settings, greedy, alternating."""
HEADINGS = ("method", "program", "pairs", "ratio", "ours t/s", "theirs t/s", "same text")
MAX_LISTED = 10
NONE = "–"


def table(comparisons: Sequence[Comparison]) -> Table:
    """One row for each method."""
    return Table(
        title=TITLE,
        headings=HEADINGS,
        rows=[_row(comparison) for comparison in comparisons],
        note=NOTE,
    )


def failures(comparisons: Sequence[Comparison]) -> str:
    """Lists failed pairs with their reasons, 10 at most; empty if none failed."""
    found = [(one.method, failure) for one in comparisons for failure in one.failures]
    if not found:
        return ""
    n_pairs = len(found) + sum(len(one.pairs) for one in comparisons)
    lines = [f"{len(found)} of {n_pairs} pairs failed and are excluded from the ratios:"]
    lines += [_failure(str(method), failure) for method, failure in found[:MAX_LISTED]]
    if len(found) > MAX_LISTED:
        lines.append(f"  and {len(found) - MAX_LISTED} more; --json saves them all")
    given_up = [str(one.method) for one in comparisons if one.given_up]
    if given_up:
        lines.append(f"given up after three failures: {', '.join(given_up)}")
    return "\n".join(lines)


def _row(comparison: Comparison) -> list[str]:
    pairs = comparison.pairs
    n_all = len(pairs) + len(comparison.failures)
    counted = f"{len(pairs)} of {n_all}" if comparison.failures else str(len(pairs))
    head = [str(comparison.method), comparison.program.name, counted]
    if not pairs:
        return [*head, "failed", NONE, NONE, NONE]
    ratios = [pair.ratio for pair in pairs]
    texts = [pair.same_text for pair in pairs if pair.same_text is not None]
    return [
        *head,
        f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{median(pair.ours.tokens_per_second for pair in pairs):.1f}",
        f"{median(pair.theirs.tokens_per_second for pair in pairs):.1f}",
        f"{sum(texts)} of {len(texts)}" if texts else NONE,
    ]


def _failure(method: str, failure: Failure) -> str:
    return f"  {method}  {failure.prompt_id}: {failure.reason}"
