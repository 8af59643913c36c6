"""A table of results, as text for the terminal and as HTML for the report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

NAME_WIDTH = 24  # longer names of rows get a line of their own


@dataclass(frozen=True)
class Table:
    """A title, headings and rows of strings; the first column names the row.

    note  explains the columns in a sentence or two
    gap   spaces between columns in the terminal
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
