"""--report: writes an HTML page with figures, tables, and details of the machine and settings.

The page is self-contained: no scripts, no fonts, no network access. The figures are also written as
separate SVG files.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from speculation.bench.plots import style, svg
from speculation.bench.report import choices, counted
from speculation.bench.results import Results
from speculation.bench.suites.suite import Suite
from speculation.bench.summary import ALL, Row, summarise
from speculation.bench.table import Table, breakable
from speculation.drafter import BASELINE

_CSS = """\
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f8; color: #222; line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.2rem 1.4rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .7rem; }
p.lead { margin: 0 0 1.4rem; color: #555b63; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr));
  gap: .8rem; }
.card { background: #fff; border: 1px solid #dfe2e6; border-radius: .6rem; padding: .7rem 1rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.card span { color: #555b63; font-size: .86rem; overflow-wrap: anywhere; }
figure { margin: 0 0 1.2rem; background: #fff; border: 1px solid #dfe2e6; border-radius: .6rem;
  padding: 1rem 1rem .7rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: #555b63; font-size: .88rem; margin-top: .5rem; }
.scroll { overflow: auto; max-height: 46rem; background: #fff;
  border: 1px solid #dfe2e6; border-radius: .6rem;
  margin-bottom: .8rem; padding: .2rem .9rem .5rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums;
  width: 100%; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; white-space: nowrap; }
th, td { text-align: right; padding: .22rem .4rem; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: #555b63; font-weight: 600; border-bottom: 1px solid #c9cdd3; background: #fff;
  position: sticky; top: 0; }
tbody th { font-weight: 500; white-space: normal; }
tbody tr + tr > * { border-top: 1px solid #eef0f2; }
table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts th { color: #555b63; vertical-align: top; width: 11rem; }
.note { color: #555b63; font-size: .86rem; margin: -.2rem 0 1rem; }
pre { background: #fff; border: 1px solid #dfe2e6; border-radius: .6rem; padding: .8rem 1rem;
  overflow-x: auto; font-size: .84rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
"""


def check_folder(folder: Path) -> None:
    """Check before measuring that ``folder`` can be created. Raises InvalidParameter."""
    if folder.exists() and not folder.is_dir():
        raise InvalidParameter(f"cannot write --report {folder}: it is a file; give a folder")


def write_report(
    folder: Path,
    suite: Suite,
    results: Results,
    *,
    differences: str,
    notes: Sequence[str],
    command: str,
) -> Path:
    """Write ``index.html`` and the figures into ``folder``; return the page's path.

    ``differences`` is the report of differing texts, ``notes`` are the suite's notes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    with style():
        for name, caption, figure in suite.figures(results):
            picture = svg(figure)
            (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
            pictures.append(_figure(name, caption, picture))
    rows = summarise(results.runs)
    model = results.model["name"] or results.model["file"]
    body = [
        f"<h1>{escape(str(model))}: {escape(suite.title)}</h1>",
        f"<p class=lead>{escape(str(results.model['description']))} · "
        f"{escape(', '.join(results.device['devices']))} · "
        f"{counted(results.device['threads'], 'thread')} · {escape(_when(results.started))}"
        f"{'' if results.complete else ' · unfinished: results so far'}</p>",
        *(f"<p class=note>{escape(note)}</p>" for note in notes),
        _cards(rows),
        "<h2>Figures</h2>",
        *pictures,
        *_section("Draft sources", choices(rows)),
        *_section("Tables", suite.tables(results)),
        *(["<h2>Texts</h2>", f"<pre>{escape(differences)}</pre>"] if differences else []),
        "<h2>Measured on</h2>",
        _facts("Model", results.model),
        _facts("Device", results.device),
        _facts("Settings", results.settings),
        "<h2>Command</h2>",
        f"<pre>{escape(command)}</pre>",
    ]
    page = folder / "index.html"
    page.write_text(_document(f"{model}: {suite.title}", body), encoding="utf-8")
    return page


def command_line(arguments: Sequence[str]) -> str:
    """The command as it was given, with paths reduced to file names for privacy."""
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        if "--prompt" in (before, flag):
            shown.append(argument)
        elif equals and flag.startswith("--"):
            shown.append(f"{flag}={Path(value).name}")
        else:
            shown.append(Path(argument).name)
    return shlex.join(["python", "-m", "speculation.bench", *shown])


def _cards(rows: Sequence[Row]) -> str:
    """The three fastest methods, all prompts together, and plain decoding."""
    overall = [row for row in rows if row.category == ALL]
    others = [row for row in overall if row.method != BASELINE]
    others.sort(key=lambda row: row.speed_up_overall, reverse=True)
    cards = [
        (f"{row.speed_up_overall:.2f}×", f"{row.method}, {row.tokens_per_step:.2f} tokens per step")
        for row in others[:3]
    ]
    cards += [
        (f"{row.tokens_per_second:,.0f} tokens/s", "plain decoding")
        for row in overall
        if row.method == BASELINE
    ]
    shown = "".join(
        f"<div class=card><b>{escape(figure)}</b><span>{breakable(text)}</span></div>"
        for figure, text in cards
    )
    return f"<div class=cards>{shown}</div>" if shown else ""


def _section(title: str, tables: Sequence[Table]) -> list[str]:
    return [f"<h2>{title}</h2>", *(table.html() for table in tables)] if tables else []


def _figure(name: str, caption: str, picture: str) -> str:
    """The SVG as an embedded image, so that the ids of two figures cannot clash."""
    data = base64.b64encode(picture.encode("utf-8")).decode("ascii")
    return (
        f'<figure id="{escape(name)}"><img alt="{escape(caption)}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(_format(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return (
        f"<div class=scroll><table class=facts>\n<caption>{escape(title)}</caption>\n"
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _when(started: str) -> str:
    """``2026-01-31 12:30 UTC`` from ISO 8601."""
    return f"{started[:10]} {started[11:16]} UTC"


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 100_000 else str(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _document(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )
