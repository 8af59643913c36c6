"""Loads GBNF grammars and converts JSON schemas, with llama.cpp's parse errors.

llama.cpp prints grammar errors to stderr instead of its log, and runs out of memory or stack on
some invalid grammars; those are rejected here first.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

import llama_cpp.llama_cpp as C

from batching.errors import GrammarError
from batching.llama.log import clear_log, recent_log
from batching.llama.model import Model

MAX_DEPTH = 500  # nested brackets; llama.cpp's parser is recursive

_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_REPETITION = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")


def load_grammar(model: Model, gbnf: str, root: str) -> Any:
    """A ``llama_sampler *`` for ``gbnf``, to be freed by the caller.

    Raises GrammarError with llama.cpp's reason if it does not parse.
    """
    reason = _syntax_error(gbnf)
    if not reason:
        clear_log()
        with TemporaryFile() as captured:
            with _stderr_to(captured):
                grammar = C.llama_sampler_init_grammar(model.vocab, gbnf.encode(), root.encode())
            if grammar:
                return grammar
            captured.seek(0)
            stderr = captured.read().decode("utf-8", "replace").strip()
        reason = (stderr or recent_log()).split("\n")[0].removeprefix("parse: ")
    raise GrammarError(
        f"the grammar does not parse: {reason}; it starts with {gbnf[:60]!r}; "
        f"see llama.cpp's grammars/README.md for GBNF"
    )


def json_schema_to_gbnf(schema: str | Mapping[str, Any]) -> str:
    """Convert a JSON schema, as text or a mapping, to a GBNF grammar.

    Raises GrammarError if the schema cannot be read.
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf as convert

    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is not a JSON object")
        return str(convert(text))
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise GrammarError(
            f"the JSON schema cannot be read: {kind}{error}; it starts with {text[:60]!r}"
        ) from error


def _syntax_error(gbnf: str) -> str:
    """Why a grammar must not be passed to llama.cpp; empty if it may be."""
    syntax = _LITERALS.sub(" ", gbnf)
    for match in _REPETITION.finditer(syntax):
        if int(match[2]) < int(match[1]):
            return f"in {match[0]} the minimum exceeds the maximum"
    depth = 0
    for bracket in re.findall(r"[()]", syntax):
        depth += 1 if bracket == "(" else -1
        if depth > MAX_DEPTH:
            return f"brackets are nested more than {MAX_DEPTH} deep"
    return "" if syntax.strip() else "it is empty"


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect the process's stderr, including that of C code, into ``file``."""
    try:
        before = os.dup(2)
    except OSError:  # a program without a console has no stderr
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
