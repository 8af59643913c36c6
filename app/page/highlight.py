"""Syntax highlighting of code blocks, by Pygments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, String
from pygments.util import ClassNotFound

MAX_CODE = 50_000  # characters
_CLASSES = (
    (Comment, "comment"),
    (Keyword, "keyword"),
    (String, "string"),
    (Number, "number"),
    (Name.Function, "name"),
    (Name.Class, "name"),
    (Name.Decorator, "name"),
    (Name.Builtin, "builtin"),
    (Name.Attribute, "name"),
    (Name.Tag, "keyword"),
    (Generic.Deleted, "deleted"),
    (Generic.Inserted, "inserted"),
)


def highlighted(code: str, language: str) -> list[tuple[str, str]]:
    """The code in parts, each after its CSS class, which may be empty."""
    plain = [("", code)]
    if not language or len(code) > MAX_CODE:
        return plain
    try:
        # ``_parts`` keeps newlines as they are, so the parts should add up to the code.
        parts = list(_parts(code, language))
    except (ClassNotFound, RecursionError, ValueError, IndexError, KeyError):
        return plain
    return parts if "".join(text for _, text in parts) == code else plain


def _parts(code: str, language: str) -> Iterator[tuple[str, str]]:
    kind, text = "", ""
    for _, type_, value in get_lexer_by_name(language).get_tokens_unprocessed(code):
        found = _class_of(type_)
        if found != kind and text:
            yield kind, text
            text = ""
        kind, text = found, text + value
    if text:
        yield kind, text


@cache
def _class_of(type_: Any) -> str:
    return next((name for parent, name in _CLASSES if type_ in parent), "")
