"""Loads GBNF grammars, at once or lazily, and converts JSON schemas, with llama.cpp's parse errors.

llama.cpp prints most grammar errors to stderr instead of its log, and runs out of memory or stack
on some invalid grammars, so the syntax is checked here first.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as C

from batching.errors import GrammarError
from batching.llama.log import clear_log, reason
from batching.llama.model import Model
from batching.llama.native import Native
from batching.watched import GRAMMAR_SECONDS, Watched

MAX_DEPTH = 500  # nested brackets; llama.cpp's parser is recursive

_LAZY_ROOT = "lazy-root"
_ESCAPE = r'\\(?:[trn"\\\[\]-]|x[\dA-Fa-f]{2}|u[\dA-Fa-f]{4}|U[\dA-Fa-f]{8})'
_SYNTAX = re.compile(
    rf"""
      \s+ | \#[^\n]* | [()|.*+?] | !?<[^>]*>
    | "(?:[^"\\]|{_ESCAPE})*"
    | \[(?:[^\]\\]|{_ESCAPE})*\]
    | \{{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d+)?\s*)?\}}
    | (?P<rule>[A-Za-z\d-]+)\s*::=
    | (?P<name>[A-Za-z\d-]+)
    """,
    re.VERBOSE,
)
# The converter writes repetitions out, which for 10**9 of them takes all memory.
_MANY = re.compile(r'"(?:(?:min|max)(?:Length|Items)"\s*:\s*|pattern"\s*:\s*"[^"]*\{\d*,?)\d{5,}')


def load_grammar(model: Model, gbnf: str, root: str) -> Native:
    """A ``llama_sampler *`` for ``gbnf``. Raises GrammarError with the reason if it fails."""
    problem = _syntax_error(gbnf, root)
    if not problem:
        native = model.native
        clear_log()
        with Watched("a grammar", GRAMMAR_SECONDS):
            grammar = C.llama_sampler_init_grammar(native.vocab, gbnf.encode(), root.encode())
        if grammar:
            return Native(grammar, C.llama_sampler_free, native)
        problem = reason()
    raise GrammarError(
        f"the grammar does not parse: {problem}; it starts with {gbnf[:60]!r}; "
        f"see llama.cpp's grammars/README.md for GBNF"
    )


def grammar_allows(grammar: Native, token: int) -> bool:
    """Whether a grammar accepts ``token`` as the next one."""
    one = C.llama_token_data(id=token, logit=1.0, p=0.0)
    array = C.llama_token_data_array(data=ctypes.pointer(one), size=1, selected=-1, sorted=False)
    C.llama_sampler_apply(grammar.handle, ctypes.byref(array))
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
        load_grammar(model, gbnf, root)  # reports a syntax error early

    def triggered_by(self, token: int) -> bool:
        """Whether the text with ``token`` has a trigger."""
        return self._start(token) is not None

    def accept(self, token: int) -> None:
        """Add a token that does not complete a trigger."""
        self._tokens.append((token, len(self._text)))
        self._text += self._piece(token)

    def started_with(self, token: int) -> Native | None:
        """A ``llama_sampler *`` that has accepted the text from the trigger on, up to ``token``,
        which completes the trigger. None if the grammar rejects that text."""
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
                return None
            C.llama_sampler_accept(grammar.handle, item)
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


def _syntax_error(gbnf: str, root: str) -> str:
    """Why a grammar is none, or must not be passed to llama.cpp; empty if it may be.

    llama.cpp finds the rest, such as left recursion.
    """
    used, defined, depth, at = {root: 0}, set(), 0, 0
    while at < len(gbnf):
        match = _SYNTAX.match(gbnf, at)
        if match is None:
            return f"line {gbnf.count(chr(10), 0, at) + 1}: unexpected {gbnf[at : at + 30]!r}"
        text, at = match[0], match.end()
        if match["rule"]:
            defined.add(match["rule"])
        elif match["name"]:
            used.setdefault(text, at)
        elif match["most"] and int(match["most"]) < int(match["least"]):
            return f"in {text} the minimum exceeds the maximum"
        depth += (text == "(") - (text == ")")
        if not 0 <= depth <= MAX_DEPTH:
            return (
                f"brackets are nested more than {MAX_DEPTH} deep" if depth > 0 else "a ) too many"
            )
    if depth:
        return f"{depth} ( are not closed"
    missing = [name for name in used if name not in defined]
    return f"it has no rule {missing[0]!r}" if missing else ""
