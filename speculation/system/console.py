"""What programs print, wherever it goes."""

from __future__ import annotations

import sys


def print_anything() -> None:
    """Have ``?`` printed for what a console or pipe cannot show: texts, and names of files, are
    anything, and on Windows a pipe has some 200 characters."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
