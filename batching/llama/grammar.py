"""Loads GBNF grammars, at once or lazily, and converts JSON schemas, with llama.cpp's parse errors.

llama.cpp prints grammar errors to stderr instead of its log, and runs out of memory or stack on
some invalid grammars; those are rejected here first.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

import llama_cpp.llama_cpp as C

from batching.errors import GrammarError
from batching.llama.log import clear_log, recent_log
from batching.llama.model import Model
from batching.watched import GRAMMAR_SECONDS, Watched

MAX_DEPTH = 500  # nested brackets; llama.cpp's parser is recursive

_LAZY_ROOT = "lazy-root"
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
# The converter writes repetitions out, which for 10**9 of them takes all memory.
_MANY = re.compile(r'"(?:(?:min|max)(?:Length|Items)"\s*:\s*|pattern"\s*:\s*"[^"]*\{\d*,?)\d{5,}')
_REPETITION = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")


def load_grammar(model: Model, gbnf: str, root: str) -> Any:
    """A ``llama_sampler *`` for ``gbnf``, to be freed by the caller.

    Raises GrammarError with llama.cpp's reason if it does not parse.
    """
    reason = _syntax_error(gbnf)
    if not reason:
        clear_log()
        with TemporaryFile() as captured:
            with _stderr_to(captured), Watched("a grammar", GRAMMAR_SECONDS):
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


def grammar_allows(grammar: Any, token: int) -> bool:
    """Whether a grammar accepts ``token`` as the next one."""
    one = C.llama_token_data(id=token, logit=1.0, p=0.0)
    array = C.llama_token_data_array(data=ctypes.pointer(one), size=1, selected=-1, sorted=False)
    C.llama_sampler_apply(grammar, ctypes.byref(array))
    return math.isfinite(one.logit)


class LazyGrammar:
    """A grammar that waits for a trigger in the text.

    llama.cpp has lazy grammars too, but they end the process if the token that completes a trigger
    goes on with text that the grammar rejects. This one only reports the rejection.
    """

    def __init__(self, model: Model, gbnf: str, root: str, triggers: Sequence[str]) -> None:
        """``triggers`` are regular expressions. The grammar applies from the first group in the
        match on, or from the start of the match if there is no group.

        Raises GrammarError if the grammar or a trigger does not parse.
        """
        self._model, self._gbnf, self._root = model, gbnf, root
        self._triggers = [trigger_pattern(trigger) for trigger in triggers]
        self._text = b""
        self._tokens: list[tuple[int, int]] = []  # each with its start in the text
        C.llama_sampler_free(load_grammar(model, gbnf, root))  # reports a syntax error early

    def triggered_by(self, token: int) -> bool:
        """Whether the text with ``token`` has a trigger."""
        return self._start(token) is not None

    def accept(self, token: int) -> None:
        """Add a token that does not complete a trigger."""
        self._tokens.append((token, len(self._text)))
        self._text += self._piece(token)

    def started_with(self, token: int) -> Any:
        """A ``llama_sampler *`` that has accepted the text from the trigger on, up to ``token``,
        which completes the trigger. To be freed by the caller. None if the grammar rejects that
        text."""
        start = self._start(token)
        assert start is not None
        tokens = [*self._tokens, (token, len(self._text))]
        ends = [at for _, at in tokens[1:]] + [len(self._text) + len(self._piece(token))]
        covered = [item for item, end in zip(tokens, ends, strict=True) if end > start]
        text = self._text + self._piece(token)
        try:
            # What the first token has before the grammar's start becomes a part of the grammar.
            before = text[covered[0][1] : start].decode() if covered else ""
        except UnicodeDecodeError:
            return None
        quoted = before.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        gbnf = f'{_LAZY_ROOT} ::= "{quoted}" {self._root}\n{self._gbnf}'
        grammar = load_grammar(self._model, gbnf, _LAZY_ROOT)
        for item, _ in covered:
            if not grammar_allows(grammar, item):
                C.llama_sampler_free(grammar)
                return None
            C.llama_sampler_accept(grammar, item)
        return grammar

    def _start(self, token: int) -> int | None:
        """Where the grammar starts in the text with ``token``; None if nothing triggers it."""
        piece = self._piece(token)
        for trigger in self._triggers:
            find = trigger.match if trigger.pattern.startswith(rb"\A") else trigger.search
            match = find(self._text + piece) if piece else None
            if match is not None:
                starts = (match.start(i + 1) for i in range(trigger.groups))
                return next((start for start in starts if start >= 0), match.start())
        return None

    def _piece(self, token: int) -> bytes:
        return b"" if token in self._model.ends else self._model.piece(token)


def trigger_pattern(trigger: str) -> re.Pattern[bytes]:
    """Compile a trigger of a lazy grammar; raises GrammarError if it is no regular expression."""
    try:
        return re.compile(trigger.encode())
    except re.error as error:
        raise GrammarError(
            f"the grammar trigger {trigger!r} is not a regular expression: {error}"
        ) from error


def json_schema_to_gbnf(schema: str | Mapping[str, Any]) -> str:
    """Convert a JSON schema, as text or a mapping, to a GBNF grammar.

    Raises GrammarError if the schema cannot be read.
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf as convert

    text = schema if isinstance(schema, str) else ""
    try:
        text = text or json.dumps(schema)
        if _MANY.search(text):
            raise ValueError("it repeats something 10,000 times or more")
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is not a JSON object")
        with Watched("a JSON schema", GRAMMAR_SECONDS):
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
