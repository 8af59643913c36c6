"""A table of results, as text for the terminal and as HTML for the report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """A title, headings and rows of strings; the first column names the row.

    note  explains the columns in a sentence or two
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def text(self, limit: int | None = None) -> str:
        """The table in aligned columns, with at most ``limit`` rows."""
        shown = self.rows[:limit]
        widths = [max(map(len, column)) for column in zip(self.headings, *shown, strict=True)]
        lines = [self.title] if self.title else []
        for row in (self.headings, *shown):
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        if len(shown) < len(self.rows):
            lines.append(f"and {len(self.rows) - len(shown)} more; --json and --report have them")
        return "\n".join([*lines, self.note] if self.note else lines)

    def html(self) -> str:
        """A ``<table>`` with its title as the caption."""
        head = "".join(f"<th scope=col>{escape(text)}</th>" for text in self.headings)
        body = "\n".join(
            f"<tr><th scope=row>{breakable(row[0])}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        note = f"\n<p class=note>{escape(self.note)}</p>" if self.note else ""
        return (
            f"<div class=scroll><table>\n<caption>{escape(self.title)}</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>{note}"
        )


def breakable(text: str) -> str:
    """``text`` escaped for HTML, with a line break allowed after each of a method's parameters."""
    return escape(text).replace(",", ",<wbr>")
