"""Splits a reply, while it is generated, into reasoning, content and tool calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from speculation.chat.prefixes import beginning_of, n_settled
from speculation.chat.reasoning import REASONING_MARKS
from speculation.chat.tool_format import ID, INDEX, ToolFormat, atoms
from speculation.chat.tools import ANY_TYPE, STRING, Tool, parameter_types, value_of


@dataclass(frozen=True)
class Content:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A part of the reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a tool call; ``index`` counts the reply's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of a call's arguments; all parts together are the text of a JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


class ReplyParser:
    """Reads a reply piece by piece. ``feed`` returns what is certain, ``finish`` the rest.

    Holds back only text that may still become a mark. Marks, and white space beside calls, are in
    no delta. Text that looks like a call but is none becomes content. Arguments are passed on as
    they arrive, so those of a reply that ends inside a call are incomplete: ``in_call``.

    Models also write calls in another form than their template's. Those are read, too, if they name
    one of the tools: JSON that is an answer of its own, starts a line, or is in a block or a tag.
    """

    def __init__(
        self, format_: ToolFormat | None, opening: str = "", tools: Sequence[Tool] = ()
    ) -> None:
        """``format_`` None looks for no calls; ``opening`` is the opening mark of reasoning if the
        prompt ended with it; ``tools`` tell strings from other arguments where a model's calls do
        not, and have the names that a call without a mark needs."""
        self._format = format_
        functions = (tool.get("function") for tool in tools)
        self._names = {each.get("name") for each in functions if isinstance(each, Mapping)}
        own = [] if format_ is None else [_patterns(format_)]
        self._forms = [*own, _OTHER] if own and self._names else own
        self._patterns = _OTHER  # of the present call
        self._types = parameter_types(tools) if format_ and format_.parameters else {}
        self._held = opening
        self._read: Callable[[bool], list[Delta]] = self._read_start
        self._close = ""  # pattern of the mark after the reasoning
        self._n_calls = 0
        self._at_call = True  # a call without a mark may start here
        self._json = _JsonEnd()
        self._name = ""  # of the present call
        self._n_keys = 0  # of its arguments so far
        self._value: frozenset[str] | None = None  # types of the argument being read

    def feed(self, text: str) -> list[Delta]:
        """Add the next part of the reply."""
        self._held += text
        return self._advance(last=False)

    def finish(self) -> list[Delta]:
        """What is still held back, after the reply has ended."""
        return self._advance(last=True)

    @property
    def in_call(self) -> bool:
        """Whether the arguments of a call have begun and not ended."""
        return self._read in (self._read_json, self._read_parameters, self._read_notation)

    def _advance(self, last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        read = None
        while read != self._read:  # each phase reads its part, then sets the next one
            read = self._read
            deltas += read(last)
        return joined(deltas)

    def _take(self, n: int | None = None) -> str:
        n = len(self._held) if n is None else n
        taken, self._held = self._held[:n], self._held[n:]
        return taken

    def _read_start(self, last: bool) -> list[Delta]:
        if not last and any(beginning_of(b).fullmatch(self._held) for b, _ in REASONING_MARKS):
            return []
        self._read = self._read_answer
        for before, after in REASONING_MARKS:
            found = re.match(before, self._held)
            if found is not None:
                self._take(found.end())
                self._read, self._close = self._read_reasoning, after
                break
        return []

    def _read_reasoning(self, last: bool) -> list[Delta]:
        found = re.search(self._close, self._held)
        if found is not None:
            may_go_on = beginning_of(self._close).fullmatch(self._held, found.start())
            if last or may_go_on is None:
                self._read = self._read_answer
                return [Reasoning(self._take(found.end())[: found.start()])]
        return [Reasoning(self._take(None if last else n_settled(self._held, self._close)))]

    def _read_answer(self, last: bool) -> list[Delta]:
        call = self._next_call(last)
        if call is not None:
            found, self._patterns = call
            before = Content(self._take(len(self._held[: found.start()].rstrip())))
            start, name = found.end() - 1 - len(before.text), found.groups()[-1]
            if self._held[start] == '"' and not self._patterns.key:
                text = _STRING.match(self._held, start)
                if text is None:
                    return [before]
                self._take(text.end())
                self._read = self._read_tail
                return [before, self._start(name), self._arguments(_object_in(text[0]))]
            if self._patterns.quote:
                self._take(found.start() - len(before.text))
                self._read = self._read_notation
                return [before]
            self._take(start)
            self._read, self._json = self._read_json, _JsonEnd()
            if self._patterns.key:
                self._read = self._read_parameters
                self._n_keys, self._value = 0, None
            return [before, self._start(name)]
        held, n = self._held, len(self._held)
        if not last:
            n = min((n_settled(held, form.head) for form in self._forms), default=n)
            bare = (form.bare for form in self._forms if form.bare and self._at_call)
            if any(beginning_of(each).fullmatch(held) for each in bare):
                n = 0
            n = len(held[:n].rstrip()) if self._forms else n
            n = n if len(held) - n <= _MOST_HELD else len(held)
        elif self._n_calls and not held.strip():
            n = 0
        self._at_call = self._at_call and n == 0
        return [Content(self._take(n))]

    def _next_call(self, last: bool) -> tuple[re.Match[str], _Patterns] | None:
        """The first call in what is held, up to the first character of its arguments."""
        calls = []
        for form in self._forms:
            found = [re.match(form.bare, self._held)] if self._at_call and form.bare else []
            for call in (*found, *re.finditer(form.head, self._held)):
                if call is not None and self._is_call(call, form, last):
                    calls.append((call, form))
                    break
        return min(calls, key=lambda call: call[0].span()[::-1], default=None)

    def _is_call(self, found: re.Match[str], form: _Patterns, last: bool) -> bool:
        if form.by_name and self._names and found.groups()[-1] not in self._names:
            return False
        if found[0][-1] != '"' or form.key:
            return True
        text = _STRING.match(self._held, found.end() - 1)
        return not last if text is None else _object_in(text[0]) != ""

    def _start(self, name: str) -> CallStart:
        self._n_calls += 1
        self._name = name
        return CallStart(self._n_calls - 1, name)

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self._n_calls - 1, text)

    def _read_json(self, last: bool) -> list[Delta]:
        text, end = self._json.read(self._held)
        self._take(end)
        if end is not None:
            self._read = self._read_tail
        return [self._arguments(text)]

    def _read_parameters(self, last: bool) -> list[Delta]:
        """Read arguments that are written one by one."""
        deltas: list[Delta] = []
        key, after, tail = self._patterns.key, self._patterns.after, self._patterns.tail
        while True:
            if self._value is not None:
                found = self._end_of_value(last)
                if self._value == STRING:
                    n = len(self._held) if last else n_settled(self._held, after)
                    text = self._take(n if found is None else found.start())
                    deltas.append(self._arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
                if found is None:
                    return deltas
                text = self._take(len(found[0]) if self._value == STRING else found.end())
                if self._value == STRING:
                    deltas.append(self._arguments('"'))
                else:
                    text = text[: found.start()]
                    deltas.append(self._arguments(_dumped(value_of(text, self._value), text)))
                self._value = None
            elif (found := re.match(key, self._held)) and (last or found.end() < len(self._held)):
                self._take(found.end())
                types = self._types.get(self._name, {}).get(found[1], ANY_TYPE)
                is_string = found[2] is not None or types == STRING
                self._value = STRING if is_string else types
                separator = ", " if self._n_keys else "{"
                self._n_keys += 1
                text = f"{separator}{json.dumps(found[1], ensure_ascii=False)}: "
                deltas.append(self._arguments(text + ('"' if is_string else "")))
            elif any(beginning_of(each).fullmatch(self._held) for each in (key, tail)):
                if re.fullmatch(tail, self._held) is None or not last:
                    return deltas
                break
            else:
                break
        self._read = self._read_tail
        return [*deltas, self._arguments("}" if self._n_keys else "{}")]

    def _end_of_value(self, last: bool) -> re.Match[str] | None:
        """What is after the argument that is being read. A value that must be JSON may have it in
        its strings, too."""
        found = re.finditer(self._patterns.after, self._held)
        first = next(found, None)
        if self._value is None or "string" in self._value or first is None:
            return first
        for match in (first, *found):
            with suppress(ValueError):
                json.loads(self._held[: match.start()])
                return match
        return first if last else None

    def _read_tail(self, last: bool) -> list[Delta]:
        tail = self._patterns.tail
        is_beginning = beginning_of(tail).fullmatch(self._held) is not None
        if is_beginning and not last:
            return []
        found = re.match(tail, self._held)
        if found is not None:
            self._take(found.end())
        elif is_beginning:  # the reply ends before the call's closing mark
            self._take()
        self._read, self._at_call = self._read_answer, True
        return []

    def _read_notation(self, last: bool) -> list[Delta]:
        """Read a whole call whose arguments have bare keys."""
        assert self._format is not None
        quote, tail = self._patterns.quote, self._patterns.tail
        head = re.match(self._patterns.head, self._held)
        assert head is not None
        parts = self._held[head.end() - 1 :].split(quote)  # every second one is a string
        ends = ((i, re.search(r"\}\s*" + tail, parts[i])) for i in range(0, len(parts), 2))
        i, end = next(((i, end) for i, end in ends if end is not None), (0, None))
        name = head[head.lastindex or 0]
        if end is None:
            begun = _quoted(parts).removesuffix('"' if len(parts) % 2 == 0 else "")
            return [self._start(name), self._arguments(begun)] if last else []
        rest = parts[i][end.start() + 1 :].lstrip()
        may_go_on = self._format.end and i == len(parts) - 1 and beginning_of(tail).fullmatch(rest)
        if may_go_on and not last:
            return []
        arguments = _to_json([*parts[:i], parts[i][: end.start() + 1]])
        self._read, self._at_call = self._read_answer, bool(arguments)
        if not arguments:
            return [Content(self._take(head.end()))]
        self._held = quote.join([parts[i][end.end() :], *parts[i + 1 :]])
        return [self._start(name), self._arguments(arguments)]


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas with neighbours of the same kind joined, without empty ones."""
    result: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            result.append(delta)
        elif delta.text:
            before = result[-1] if result else None
            if isinstance(before, type(delta)) and replace(before, text=delta.text) == delta:
                result[-1] = replace(before, text=before.text + delta.text)
            else:
                result.append(delta)
    return result


NAME = "([a-zA-Z0-9_.-]+)"


class _Patterns(NamedTuple):
    """Regular expressions of calls in one form. White space may be anywhere in them.

    head   a call up to and with the first character of its arguments; the last group is its name
    bare   the same, for a call without a mark: at the start of an answer or after another call
    tail   what is after the arguments
    key    an argument's key and what is around it; its second group shows that a string follows
    after  what is after an argument
    quote  what is around strings, if keys are bare
    by_name  whether only the name of a tool shows that it is a call
    """

    head: str
    bare: str = ""
    tail: str = ""
    key: str = ""
    after: str = ""
    quote: str = ""
    by_name: bool = False


_NO_CALLS = r"[^\s\S]"


@lru_cache(maxsize=16)
def _patterns(format_: ToolFormat) -> _Patterns:
    named = rf"{pattern_of(format_.opening)}{NAME}{pattern_of(format_.middle)}\s*"
    tail = pattern_of(format_.close)
    if format_.end:
        tail += f"(?:{pattern_of(format_.end)})?"
    if "}" in format_.close:
        tail = f"(?:{tail}|{_OTHER.tail})"
    key, after, start = "", "", r"\{"
    parameters = format_.parameters
    if parameters is not None:
        starts = [text.lstrip()[:1] for text in (parameters.before, format_.close)]
        start = f"[{''.join(map(re.escape, starts))}]" if all(starts) else r"[^\s]"
        string = _outside(parameters.string, at_end=True)
        value = _outside(parameters.value, at_end=True)
        kinds = f"({string})|{value}" if string != value else rf"{value}|([^\s\S])"
        key = rf"\s*(?:{pattern_of(parameters.between)})?{pattern_of(parameters.before)}"
        key += rf"""([^<>"'=:,\n(){{}}\[\]]+)(?:{kinds})"""
        after = _outside(parameters.after, at_end=False)
    call = f"{pattern_of(format_.begin)}{named}{start}".removeprefix(r"\s*")
    if format_.mark:
        between = pattern_of(format_.between or "")
        bare = rf"\s*{between}{named}{start}" if format_.begin else ""
        return _Patterns(call, bare, tail, key, after, format_.quote)
    bare = rf"\s*(?:;\s*)?{call}"
    head = rf"{re.escape(format_.tag)}{bare}" if format_.tag else _NO_CALLS
    return _Patterns(head, bare, tail, key, after, format_.quote, by_name=True)


# Calls as models write them that do not keep to their template: in a list or not, in a block of
# code, in tags or as they are, with the names that other families have for the arguments.
_MARK = r"(?:```\w*|<[|\w]+>|\[[A-Z_]+\])\s*"
_CALL = r'(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
_CALL += rf'"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*[{{"]'
_END = r"(?:\s*(?:```\B|</[|\w]+>|\[/[A-Z_]+\]))?"
_OTHER = _Patterns(
    head=rf"(?:\n|{_MARK})(?:{_MARK})?{_CALL}",
    bare=rf"\s*(?:[,;]\s*)?(?:{_MARK})?(?:{_MARK})?{_CALL}",
    tail=rf'(?:\s*,\s*"id"\s*:\s*"[^"]*")?\s*\}}(?:\s*\}})?(?:\s*\])?{_END}{_END}',
    by_name=True,
)
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_MOST_HELD = 1000  # characters of what only begins like a call


def _object_in(string: str) -> str:
    """The JSON object that a JSON string has; empty if it has none."""
    with suppress(ValueError, RecursionError):
        text = json.loads(string, strict=False)
        return text if isinstance(json.loads(text), dict) else ""
    return ""


def pattern_of(text: str) -> str:
    """A regular expression for a text of a format, whatever white space a model writes in it."""
    parts = []
    for atom in atoms(text):
        if atom == ID:
            parts.append(r"[^\s\"<>\[\]]*")
        elif atom == INDEX:
            parts.append("[0-9]*")
        elif atom.isspace():
            parts.append(r"\s*")
        else:
            parts.append(rf"\s*{re.escape(atom)}\s*" if atom in "{}[]:," else re.escape(atom))
    return re.sub(r"(\\s\*)+", lambda found: r"\s*", "".join(parts))


def _outside(text: str, *, at_end: bool) -> str:
    """A regular expression for a text beside a value, whose own white space stays in the value."""
    bare = text.rstrip() if at_end else text.lstrip()
    line = r"\n?" if len(bare) < len(text) else ""
    return f"{pattern_of(bare)}{line}" if at_end else f"{line}{pattern_of(bare)}"


_BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:')


def _quoted(parts: Sequence[str]) -> str:
    """Text with bare keys as JSON. Every second part is a string, the others are around them."""
    return "".join(
        json.dumps(part, ensure_ascii=False) if i % 2 else _BARE_KEY.sub(r'\1"\2":', part)
        for i, part in enumerate(parts)
    )


def _to_json(parts: Sequence[str]) -> str | None:
    """An object with bare keys as JSON; None if it is none."""
    text = _quoted(parts)
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return _dumped(value, text) if isinstance(value, dict) else None


def _dumped(value: Any, text: str) -> str:
    """A value as JSON; the text that it was read from, if it has a number too large for Python."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return text.strip()


class _JsonEnd:
    """Reads a JSON object in a stream. Line breaks and tabs in its strings become escapes, which
    models forget."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> tuple[str, int | None]:
        """What the next part has of the object, and where that ends; None if it goes on."""
        written = []
        for i, character in enumerate(text):
            is_bare = self._in_string and not self._escaped and character < " "
            written.append(json.dumps(character)[1:-1] if is_bare else character)
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return "".join(written), i + 1
        return "".join(written), None
