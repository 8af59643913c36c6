"""Splits a reply, while it is generated, into reasoning, content and tool calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    they arrive, so those of a reply that ends inside a call are incomplete.

    in_call  whether the arguments of a call have begun and not ended
    n_read   how much of the text is in what was returned
    call_at  where in the text the first call begins

    Models also write calls in another form than their template's. Those are read, too, if they name
    one of the tools: JSON that is an answer of its own, starts a line, or is in a block or a tag.
    """

    def __init__(
        self, format_: ToolFormat | None, opening: str = "", tools: Sequence[Tool] = ()
    ) -> None:
        """``format_`` None looks for no calls; ``opening`` is the opening mark of reasoning if the
        prompt ended with it; ``tools`` tell strings from other arguments where a model's calls do
        not, and have the names that a call without a mark needs."""
        self._end = format_.end if format_ else ""
        functions = (tool.get("function") for tool in tools)
        self._names = {each.get("name") for each in functions if isinstance(each, Mapping)}
        own = [] if format_ is None else [_patterns(format_)]
        self._forms = [*own, _OTHER] if own and self._names else own
        self._types = parameter_types(tools) if format_ and format_.parameters else {}
        self.in_call = False
        self.n_read = -len(opening)
        self.call_at: int | None = None
        self._held = opening
        self._is_last = False  # no more text comes
        self._deltas: list[Delta] = []
        self._n_calls = 0
        self._at_call = True  # a call without a mark may start here
        self._reading = self._reply()

    def feed(self, text: str) -> list[Delta]:
        """Add the next part of the reply."""
        self._held += text
        return self._read()

    def finish(self) -> list[Delta]:
        """What is still held back, after the reply has ended."""
        self._is_last = True
        return self._read()

    def _read(self) -> list[Delta]:
        next(self._reading)
        found, self._deltas = joined(self._deltas), []
        return found

    def _take(self, n: int | None = None) -> str:
        n = len(self._held) if n is None else n
        taken, self._held = self._held[:n], self._held[n:]
        self.n_read += len(taken)
        return taken

    def _begin(self, name: str) -> None:
        if self.call_at is None:
            self.call_at = self.n_read
        self._deltas.append(CallStart(self._n_calls, name))
        self._n_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._deltas.append(CallArguments(self._n_calls - 1, text))

    # These read a part of the reply each. They yield where they need more of the text; after the
    # last one they are not resumed.

    def _reply(self) -> Iterator[None]:
        marks = REASONING_MARKS
        while not self._is_last and any(beginning_of(b).fullmatch(self._held) for b, _ in marks):
            yield
        for before, after in marks:
            found = re.match(before, self._held)
            if found is not None:
                self._take(found.end())
                yield from self._reasoning(after)
                break
        while True:
            call = self._next_call()
            if call is not None:
                yield from self._call(*call)
            else:
                self._deltas.append(Content(self._take(self._n_content())))
                yield

    def _reasoning(self, close: str) -> Iterator[None]:
        """Read up to and with the mark after the reasoning."""
        while True:
            found = re.search(close, self._held)
            if found is not None:
                may_go_on = beginning_of(close).fullmatch(self._held, found.start())
                if self._is_last or may_go_on is None:
                    self._deltas.append(Reasoning(self._take(found.end())[: found.start()]))
                    return
            n = None if self._is_last else n_settled(self._held, close)
            self._deltas.append(Reasoning(self._take(n)))
            yield

    def _n_content(self) -> int:
        """How many of the characters held are an answer's for certain, if none begins a call."""
        held, n = self._held, len(self._held)
        if not self._is_last:
            n = min((n_settled(held, form.head) for form in self._forms), default=n)
            bare = (form.bare for form in self._forms if form.bare and self._at_call)
            if any(beginning_of(each).fullmatch(held) for each in bare):
                n = 0
            n = len(held[:n].rstrip()) if self._forms else n
            n = n if len(held) - n <= _MOST_HELD else len(held)
        elif self._n_calls and not held.strip():
            n = 0
        self._at_call = self._at_call and n == 0
        return n

    def _next_call(self) -> tuple[re.Match[str], _Patterns] | None:
        """The first call in what is held, up to the first character of its arguments."""
        calls = []
        for form in self._forms:
            found = [re.match(form.bare, self._held)] if self._at_call and form.bare else []
            for call in (*found, *re.finditer(form.head, self._held)):
                if call is not None and self._is_call(call, form):
                    calls.append((call, form))
                    break
        return min(calls, key=lambda call: call[0].span()[::-1], default=None)

    def _is_call(self, found: re.Match[str], form: _Patterns) -> bool:
        if form.by_name and self._names and found.groups()[-1] not in self._names:
            return False
        if found[0][-1] != '"' or form.key:
            return True
        text = _STRING.match(self._held, found.end() - 1)
        return not self._is_last if text is None else _object_in(text[0]) != ""

    def _call(self, found: re.Match[str], form: _Patterns) -> Iterator[None]:
        """Read a call, and the white space before it."""
        before = self._take(len(self._held[: found.start()].rstrip()))
        self._deltas.append(Content(before))
        start, name = found.end() - 1 - len(before), found.groups()[-1]
        is_text = self._held[start] == '"' and not form.key
        text = _STRING.match(self._held, start) if is_text else None
        if is_text and text is None:
            yield  # and look again
            return
        if form.quote and text is None:
            self._take(found.start() - len(before))
            yield from self._notation(form)
            return
        self._begin(name)
        if text is not None:
            self._take(text.end())
            self._add_arguments(_object_in(text[0]))
        else:
            self._take(start)
            self.in_call = True
            yield from self._parameters(form, name) if form.key else self._json()
            self.in_call = False
        is_beginning = beginning_of(form.tail).fullmatch
        while is_beginning(self._held) and not self._is_last:
            yield
        end = re.match(form.tail, self._held)
        if end is not None:
            self._take(end.end())
        elif is_beginning(self._held):  # the reply ends before the call's closing mark
            self._take()
        self._at_call = True

    def _json(self) -> Iterator[None]:
        """Read a JSON object. Line breaks and tabs in its strings become escapes, which models
        forget."""
        depth, in_string, is_escaped = 0, False, False
        while True:
            written, held = [], self._take()
            for i, character in enumerate(held):
                is_bare = in_string and not is_escaped and character < " "
                written.append(json.dumps(character)[1:-1] if is_bare else character)
                if is_escaped:
                    is_escaped = False
                elif in_string:
                    is_escaped, in_string = character == "\\", character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                if not depth:
                    self._held = held[i + 1 :]
                    break
            self._add_arguments("".join(written))
            if written and not depth:
                return
            yield

    def _parameters(self, form: _Patterns, name: str) -> Iterator[None]:
        """Read arguments that are written one by one."""
        separator, types_of = "{", self._types.get(name, {})
        while True:
            found = re.match(form.key, self._held)
            if found is not None and (self._is_last or found.end() < len(self._held)):
                self._take(found.end())
                types = types_of.get(found[1], ANY_TYPE)
                is_string = found[2] is not None or types == STRING
                key = json.dumps(found[1], ensure_ascii=False)
                self._add_arguments(f"{separator}{key}: " + ('"' if is_string else ""))
                yield from self._value(form.after, STRING if is_string else types)
                separator = ", "
                continue
            may_go_on = any(
                beginning_of(each).fullmatch(self._held) for each in (form.key, form.tail)
            )
            if not may_go_on or (self._is_last and re.fullmatch(form.tail, self._held)):
                break
            yield
        self._add_arguments("{}" if separator == "{" else "}")

    def _value(self, after: str, types: frozenset[str]) -> Iterator[None]:
        """Read an argument's value, and what is after it."""
        while True:
            found = self._end_of_value(after, types)
            if types == STRING:
                n = len(self._held) if self._is_last else n_settled(self._held, after)
                text = self._take(n if found is None else found.start())
                self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if found is not None:
                break
            yield
        if types == STRING:
            self._take(len(found[0]))
            self._add_arguments('"')
        else:
            text = self._take(found.end())[: found.start()]
            self._add_arguments(_dumped(value_of(text, types), text))

    def _end_of_value(self, after: str, types: frozenset[str]) -> re.Match[str] | None:
        """What is after the argument that is being read. A value that must be JSON may have it in
        its strings, too."""
        found = re.finditer(after, self._held)
        first = next(found, None)
        if "string" in types or first is None:
            return first
        for match in (first, *found):
            with suppress(ValueError):
                json.loads(self._held[: match.start()])
                return match
        return first if self._is_last else None

    def _notation(self, form: _Patterns) -> Iterator[None]:
        """Read a whole call whose arguments have bare keys."""
        self.in_call = True
        head = re.match(form.head, self._held)
        assert head is not None
        name = head[head.lastindex or 0]
        while True:
            parts = self._held[head.end() - 1 :].split(form.quote)  # every second is a string
            ends = ((i, re.search(r"\}\s*" + form.tail, parts[i])) for i in range(0, len(parts), 2))
            i, end = next(((i, end) for i, end in ends if end is not None), (0, None))
            if end is not None:
                rest = parts[i][end.start() + 1 :].lstrip()
                is_at_end = self._end and i == len(parts) - 1
                may_go_on = is_at_end and beginning_of(form.tail).fullmatch(rest)
                if self._is_last or not may_go_on:
                    break
            elif self._is_last:
                self._begin(name)
                self._add_arguments(_quoted(parts).removesuffix('"' * (len(parts) % 2 == 0)))
            yield
        arguments = _to_json([*parts[:i], parts[i][: end.start() + 1]])
        self.in_call, self._at_call = False, bool(arguments)
        if arguments:
            self._held = form.quote.join([parts[i][end.end() :], *parts[i + 1 :]])
            self._begin(name)
            self._add_arguments(arguments)
        else:
            self._deltas.append(Content(self._take(head.end())))


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
