"""Formats the comparison as a table and text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from speculation.bench.table import Table
from tools.compare.pairs import Comparison, Failure, Pair

TITLE = "ours ÷ llama.cpp's own programs"
NOTE = """\
ratio: our tokens/s over theirs after the first token, median of the pairs (minimum to maximum);
whole: the same including the prompt; same text: pairs with equal texts. Same GGUF, prompts and
settings, greedy, alternating. restored: llama-bench's second run, which restores the prompt's state
instead of reading the prompt."""
HEADINGS = ("method", "program", "pairs", "ratio", "ours t/s", "theirs t/s", "whole", "same text")
MAX_LISTED = 10
NONE = "–"


def table(comparisons: Sequence[Comparison]) -> Table:
    """One row for each method."""
    return Table(
        title=TITLE,
        headings=HEADINGS,
        rows=[row for comparison in comparisons for row in _rows(comparison)],
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


def _rows(comparison: Comparison) -> list[list[str]]:
    """The row of a comparison, and a second one for llama-bench's restored runs."""
    rows = [_row(comparison, comparison.pairs)]
    restored = [
        replace(pair, theirs=replace(pair.theirs, tokens_per_second=pair.theirs.restored))
        for pair in comparison.pairs
        if pair.theirs.restored is not None
    ]
    if restored:
        rows.append(_row(comparison, restored))
        rows[-1][1] += ", restored"
    return rows


def _row(comparison: Comparison, pairs: Sequence[Pair]) -> list[str]:
    n_all = len(pairs) + len(comparison.failures)
    counted = f"{len(pairs)} of {n_all}" if comparison.failures else str(len(pairs))
    head = [str(comparison.method), comparison.program.name, counted]
    if not pairs:
        return [*head, "failed", NONE, NONE, NONE, NONE]
    ratios = [pair.ratio for pair in pairs]
    whole = [
        pair.ours.with_prompt / pair.theirs.with_prompt
        for pair in pairs
        if pair.ours.with_prompt and pair.theirs.with_prompt
    ]
    texts = [pair.same_text for pair in pairs if pair.same_text is not None]
    return [
        *head,
        f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{median(pair.ours.tokens_per_second for pair in pairs):.1f}",
        f"{median(pair.theirs.tokens_per_second for pair in pairs):.1f}",
        f"{median(whole):.3f}" if whole else NONE,
        f"{sum(texts)} of {len(texts)}" if texts else NONE,
    ]


def _failure(method: str, failure: Failure) -> str:
    return f"  {method}  {failure.prompt_id}: {failure.reason}"
