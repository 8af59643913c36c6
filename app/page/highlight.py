"""Syntax highlighting of code blocks, by Pygments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from pygments.lexer import ExtendedRegexLexer, LexerContext, RegexLexer
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


Stack = tuple[str, ...]  # the states of a lexer
_FAILURES = (ClassNotFound, RecursionError, ValueError, IndexError, KeyError, TypeError)


def highlighted(code: str, language: str, stack: Stack = ()) -> list[tuple[str, str]]:
    """The code in parts, each after its CSS class, which may be empty. ``stack`` is what
    ``settled`` returned for the lines before it."""
    plain = [("", code)]
    if not language or len(code) > MAX_CODE:
        return plain
    try:
        # ``_parts`` keeps newlines as they are, so the parts should add up to the code.
        parts = list(_parts(code, language, stack))
    except _FAILURES:
        return plain
    return parts if "".join(text for _, text in parts) == code else plain


@cache
def suffix(language: str) -> str:
    """The suffix of a file with code in a language."""
    try:
        names = get_lexer_by_name(language).filenames
    except ClassNotFound:
        return f".{language}" if language.isalnum() else ".txt"
    return next((name[1:] for name in names if name[:2] == "*." and name[2:].isalnum()), ".txt")


def settled(code: str, language: str, stack: Stack, limit: int) -> tuple[int, Stack]:
    """How many characters of growing code can be highlighted for good, lines up to ``limit``, and
    the lexer's stack after them. Code behind the limit may still change how the last ones look."""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return code.rfind("\n", 0, limit) + 1, stack
    if not isinstance(lexer, RegexLexer) or isinstance(lexer, ExtendedRegexLexer):
        return 0, stack  # its states are not known
    found = 0, stack
    context = LexerContext(code, 0, list(stack or ("root",)))
    with suppress(*_FAILURES):
        for at, _, text in ExtendedRegexLexer.get_tokens_unprocessed(lexer, context=context):
            start = at + text.rfind("\n") + 1 if text.isspace() else at
            if start > limit:
                break
            if context.pos == at and code.endswith("\n", 0, start):
                found = start, tuple(context.stack)
        return found
    return 0, stack


def _parts(code: str, language: str, stack: Stack) -> Iterator[tuple[str, str]]:
    kind, text, lexer = "", "", get_lexer_by_name(language)
    tokens = (
        ExtendedRegexLexer.get_tokens_unprocessed(lexer, context=LexerContext(code, 0, list(stack)))
        if stack
        else lexer.get_tokens_unprocessed(code)
    )
    for _, type_, value in tokens:
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
