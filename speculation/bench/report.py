"""Formats results: a table per category, draft sources, differing texts; lists methods. Pure."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from speculation.bench.results import Difference, Run, Skipped
from speculation.bench.summary import ALL, Row, summarise
from speculation.drafter import BASELINE, shown
from speculation.meter import PHASES
from speculation.methods import METHODS, parameter_docs

MAX_DIFFERENCES = 20
NONE = "–"
SEVERAL_SOURCES = ("auto",)  # methods that combine drafters
# Rows per step, up to powers of two.
BUCKETS = ("1", "2", "3–4", "5–8", "9–16", "17–32", "33–64", "65+")
COLUMNS = (
    *("tokens/s", "speed-up", "overall", "tokens/step", "accept", "prefill"),
    *(*PHASES, "outside"),
)
LEGEND = """\
speed-up: mean ± standard deviation over prompts; overall: from all tokens and seconds; accept:
acceptance rate; prefill: ms per run; draft to commit: ms per step; outside: µs per step outside \
decode"""


NAME_WIDTH = 24  # longer names of rows get a line of their own


@dataclass(frozen=True)
class Table:
    """A title, headings and rows of strings; the first column names the row.

    note  explains the columns in a sentence or two
    gap   spaces between columns
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    gap: int = 2

    def text(self) -> str:
        """The table in aligned columns."""
        grid = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        widths[0] = max(len(row[0]) for row in grid if len(row[0]) <= NAME_WIDTH)
        lines = [self.title]
        for name, *cells in grid:
            if len(name) > widths[0]:
                lines.append(name)
                name = ""
            aligned = [name.ljust(widths[0])]
            aligned += [cell.rjust(n) for cell, n in zip(cells, widths[1:], strict=True)]
            lines.append((" " * self.gap).join(aligned).rstrip())
        return "\n".join([*lines, self.note] if self.note else lines)


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table of methods for each category and, if there are several, one for all of them."""
    blocks = by_category(rows)
    return [
        Table(
            _title(block),
            ["method", *COLUMNS],
            [[row.method, *_cells(row)] for row in block],
            LEGEND if block is blocks[-1] else "",
            gap=1,
        )
        for block in blocks
    ]


def by_category(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each category; includes ``all`` only if there are several categories."""
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: row.category)]
    if len(blocks) == 2:  # one category and "all" are the same
        del blocks[1]
    return blocks


def choices(rows: Sequence[Row]) -> list[Table]:
    """For each method with several sources: rows per step, and which sources' drafts were accepted.

    One line per category.
    """
    found = []
    for method in dict.fromkeys(row.method for row in rows if _has_sources(row)):
        of_method = [row for block in by_category(rows) for row in block if row.method == method]
        sources = sorted({source for row in of_method for source in row.accepted_by_source})
        headings = ["steps with rows:", *BUCKETS]
        note = "share of the steps by number of rows decoded, including the root"
        if sources:
            headings += ["accepted from:", *sources]
            note += ";\nshare of the accepted draft tokens by source"
        else:
            note += "; no draft was accepted"
        lines = [_choices_of(row, sources) for row in of_method]
        found.append(Table(f"rows and draft sources of {method}", headings, lines, note))
    return found


def _choices_of(row: Row, sources: Sequence[str]) -> list[str]:
    cells = [
        category_title(row),
        *(_share(n, row.rows_histogram) for n in bucketed(row.rows_histogram)),
    ]
    if sources:
        counts = row.accepted_by_source
        cells += ["", *(_share(counts.get(source, 0), counts) for source in sources)]
    return cells


def _has_sources(row: Row) -> bool:
    return bool(row.accepted_by_source) or row.method.partition(":")[0] in SEVERAL_SOURCES


def bucketed(histogram: Mapping[int, int]) -> list[int]:
    """The counts of a histogram, summed by ``BUCKETS``."""
    counts = [0] * len(BUCKETS)
    for n, count in histogram.items():
        counts[min((n - 1).bit_length(), len(BUCKETS) - 1)] += count
    return counts


def _share(count: int, counts: Mapping[int, int] | Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{100 * count / total:.0f}%" if total else NONE


def differences(runs: Sequence[Run], piece: Callable[[int], bytes]) -> str:
    """The runs whose text differs from plain decoding's; lists the first 20.

    ``piece`` returns the bytes of a token.
    """
    found = [(run, run.first_difference) for run in runs if run.first_difference is not None]
    if not found:
        return f"every text identical to plain decoding ({counted(len(runs), 'run')})"
    lines = [
        f"{len(found)} of {len(runs)} runs differ from plain decoding; logit gap: plain decoding's "
        f"logit for its token minus that for the method's"
    ]
    lines += [_difference(run, at, piece) for run, at in found[:MAX_DIFFERENCES]]
    if len(found) > MAX_DIFFERENCES:
        lines.append(f"  and {len(found) - MAX_DIFFERENCES} more; --json saves them all")
    return "\n".join(lines)


def fastest(runs: Sequence[Run]) -> str:
    """The fastest of the methods beside plain decoding, over all tokens and seconds; empty while
    none has a speed."""
    rows = [row for row in summarise(runs) if row.category == ALL and row.method != BASELINE]
    best = max(rows, key=lambda row: row.speed_up_overall, default=None)
    if best is None or not best.speed_up_overall:
        return ""
    return f"fastest {best.method} {best.speed_up_overall:.2f}x"


def skipped_turns(skipped: Sequence[Skipped]) -> str:
    """How many turns were skipped, and which; empty if none."""
    if not skipped:
        return ""
    names = ", ".join(turn.prompt_id for turn in skipped)
    return f"{counted(len(skipped), 'prompt')} skipped, too long for the context: {names}\n"


def counted(n: int, noun: str) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _title(rows: Sequence[Row]) -> str:
    return f"{category_title(rows[0])}: {counted(max(row.n_prompts for row in rows), 'prompt')}"


def category_title(row: Row) -> str:
    """The category as tables show it."""
    return "all categories" if row.category == ALL else row.category


def _cells(row: Row) -> list[str]:
    std = NONE if row.speed_up_std is None else f"{row.speed_up_std:.2f}"
    return [
        f"{row.tokens_per_second:.1f}",
        f"{row.speed_up_mean:.2f} ± {std}",
        f"{row.speed_up_overall:.2f}",
        f"{row.tokens_per_step:.2f}",
        percent(row.acceptance_rate),
        _figure(1e3 * row.prefill_seconds),
        *(_figure(1e3 * row.phase_seconds[phase]) for phase in PHASES),
        f"{1e6 * row.outside_decode_seconds:.0f}",
    ]


def percent(rate: float | None) -> str:
    """``12.3%``; a dash for None."""
    return NONE if rate is None else f"{100 * rate:.1f}%"


def _figure(value: float) -> str:
    """At most five characters for values below 100,000."""
    decimals = 3 if value < 9.9995 else 2 if value < 99.995 else 1 if value < 999.95 else 0
    return f"{value:.{decimals}f}"


def _difference(run: Run, at: Difference, piece: Callable[[int], bytes]) -> str:
    ar_text, text = (
        "the end" if token is None else repr(piece(token).decode("utf-8", "backslashreplace"))
        for token in (at.ar_token, at.token)
    )
    gap = NONE if at.logit_gap is None else f"{at.logit_gap:.4g}"
    return (
        f"  {run.method}  {run.prompt_id}  token {at.index}: "
        f"plain {ar_text}, here {text}, logit gap {gap}"
    )


def list_methods() -> str:
    """Every method with its summary, and its parameters with their defaults."""
    found = []
    for spec in METHODS.values():
        lines = textwrap.wrap(f"{spec.name}  {spec.summary}", 100, subsequent_indent="    ")
        docs = parameter_docs(spec.params)
        for field in dataclasses.fields(spec.params):
            text = f"{field.name}={shown(field.default)}  {docs[field.name]}"
            lines += textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="        ")
        found.append("\n".join(lines))
    return "\n\n".join(found)
