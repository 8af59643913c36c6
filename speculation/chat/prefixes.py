"""Turns a regular expression into one for the beginnings of its matches, to read marks in a stream.

Pure. Supports what the marks of chat templates need: characters, classes, ``\\b``, ``\\B``, groups,
alternatives and ``?``, and ``*`` and ``+`` after a single character or class.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|\(\?:|.", re.DOTALL)


@lru_cache(maxsize=64)
def beginning_of(pattern: str) -> re.Pattern[str]:
    """A pattern whose ``fullmatch`` accepts every text that may become a match of ``pattern``.

    Example: ``beginning_of("</think>\\n*").fullmatch("</th")``.
    """
    tokens = _TOKEN.findall(pattern)
    return re.compile(_alternatives(tokens)[1])


def n_settled(text: str, pattern: str) -> int:
    """How many characters of ``text`` cannot be part of a later match of ``pattern``."""
    end = re.compile(rf"(?:{beginning_of(pattern).pattern})\Z")
    found = end.search(text)
    return len(text) if found is None else found.start()


def _alternatives(tokens: list[str]) -> tuple[str, str]:
    """Take alternatives off ``tokens``, up to a closing bracket: their pattern, and that of their
    beginnings."""
    patterns, beginnings = [], []
    while True:
        items = _sequence(tokens)
        beginning = ""
        for whole, part in reversed(items):
            beginning = f"(?:{whole}{beginning}|{part})"
        patterns.append("".join(whole for whole, _ in items))
        beginnings.append(beginning)
        if not tokens or tokens.pop(0) == ")":
            return f"(?:{'|'.join(patterns)})", f"(?:{'|'.join(beginnings)})"


def _sequence(tokens: list[str]) -> list[tuple[str, str]]:
    """Take items off ``tokens``, up to the end of an alternative: each with its beginnings."""
    items = []
    while tokens and tokens[0] not in ("|", ")"):
        whole = tokens.pop(0)
        part = "" if whole in (r"\b", r"\B") else f"{whole}?"
        if whole in ("(", "(?:"):
            whole, part = _alternatives(tokens)
        if tokens and tokens[0] in ("?", "*", "+"):
            quantifier = tokens.pop(0)
            part = part if quantifier == "?" else f"{whole}*"
            whole += quantifier
        items.append((whole, part))
    return items
