"""GBNF grammars and JSON schemas: what llama.cpp makes of them, and why it refuses one.

llama.cpp prints what is wrong with a grammar to stderr, past its own log, and runs out of memory or
stack on some that it could refuse: those are refused here.
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
from batching.llama.model import Model, forget_log, recent_log

MOST_BRACKETS = 500  # one in another; llama.cpp recurses into them

_NO_SYNTAX = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_REPEATED = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")


def load_grammar(model: Model, gbnf: str, root: str) -> Any:
    """A ``llama_sampler *`` that allows what ``gbnf`` does, for the caller to free.

    Raises GrammarError with llama.cpp's reason when it does not parse.
    """
    reason = _refusal(gbnf)
    if not reason:
        forget_log()
        with TemporaryFile() as printed:
            with _stderr_to(printed):
                grammar = C.llama_sampler_init_grammar(model.vocab, gbnf.encode(), root.encode())
            if grammar:
                return grammar
            printed.seek(0)
            said = printed.read().decode("utf-8", "replace").strip()
        reason = (said or recent_log()).split("\n")[0].removeprefix("parse: ")
    raise GrammarError(
        f"the grammar does not parse: {reason}; it starts with {gbnf[:60]!r}; "
        f"see llama.cpp's grammars/README.md for GBNF"
    )


def json_schema_to_gbnf(schema: str | Mapping[str, Any]) -> str:
    """The GBNF grammar of a JSON schema, given as text or as a mapping.

    Raises GrammarError when the schema cannot be read.
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf as convert

    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is no JSON object")
        return str(convert(text))
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise GrammarError(
            f"the JSON schema cannot be read: {kind}{error}; it starts with {text[:60]!r}"
        ) from error


def _refusal(gbnf: str) -> str:
    """Why a grammar is not even shown to llama.cpp, or nothing."""
    syntax = _NO_SYNTAX.sub(" ", gbnf)
    for match in _REPEATED.finditer(syntax):
        if int(match[2]) < int(match[1]):
            return f"{match[0]} asks for more repetitions at least than at most"
    depth = 0
    for bracket in re.findall(r"[()]", syntax):
        depth += 1 if bracket == "(" else -1
        if depth > MOST_BRACKETS:
            return f"more than {MOST_BRACKETS} brackets stand in one another"
    return "" if syntax.strip() else "it is empty"


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """What the process prints to its stderr meanwhile goes into ``file``."""
    try:
        before = os.dup(2)
    except OSError:  # a program without a console has none
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
