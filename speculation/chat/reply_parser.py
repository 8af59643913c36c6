"""Splits a reply, while it is generated, into reasoning, content and tool calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from speculation.chat.prefixes import beginning_of, n_settled
from speculation.chat.reasoning import REASONING_MARKS
from speculation.chat.tools import ToolFormat


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
    no delta. Text that looks like a call but is none becomes content. JSON arguments are passed on
    as they arrive, so those of a reply that ends inside a call are incomplete.
    """

    def __init__(self, format_: ToolFormat | None, opening: str = "") -> None:
        """``format_`` None looks for no calls; ``opening`` is the opening mark of reasoning if the
        prompt ended with it."""
        self._format = format_
        self._held = opening
        self._read: Callable[[bool], list[Delta]] = self._read_start
        self._close = ""  # pattern of the mark after the reasoning
        self._n_calls = 0
        self._at_call = True  # a call without a mark may start here
        self._json = _JsonEnd()

    def feed(self, text: str) -> list[Delta]:
        """Add the next part of the reply."""
        self._held += text
        return self._advance(last=False)

    def finish(self) -> list[Delta]:
        """What is still held back, after the reply has ended."""
        return self._advance(last=True)

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
        if found is not None and (last or found.end() < len(self._held)):
            self._read = self._read_answer
            return [Reasoning(self._take(found.end())[: found.start()])]
        return [Reasoning(self._take(None if last else n_settled(self._held, self._close)))]

    def _read_answer(self, last: bool) -> list[Delta]:
        if self._format is None:
            return [Content(self._take())]
        head, bare = self._format.head, self._format.bare if self._at_call else ""
        found = (re.match(bare, self._held) if bare else None) or re.search(head, self._held)
        if found is not None:
            before = Content(self._take(found.start()))
            if self._format.quote:
                self._read = self._read_notation
                return [before]
            self._take(found.end() - 1 - found.start())
            self._read, self._json = self._read_json, _JsonEnd()
            return [before, self._start(found.groups()[-1])]
        n = n_settled(self._held, head)
        if last:
            n = 0 if self._n_calls and not self._held.strip() else len(self._held)
        elif bare and beginning_of(bare).fullmatch(self._held):
            n = 0
        self._at_call = self._at_call and n == 0
        return [Content(self._take(n))]

    def _start(self, name: str) -> CallStart:
        self._n_calls += 1
        return CallStart(self._n_calls - 1, name)

    def _read_json(self, last: bool) -> list[Delta]:
        end = self._json.find(self._held)
        if end is not None:
            self._read = self._read_tail
        return [CallArguments(self._n_calls - 1, self._take(end))]

    def _read_tail(self, last: bool) -> list[Delta]:
        assert self._format is not None
        is_beginning = beginning_of(self._format.tail).fullmatch(self._held) is not None
        if is_beginning and not last:
            return []
        found = re.match(self._format.tail, self._held)
        if found is not None:
            self._take(found.end())
        elif is_beginning:  # the reply ends before the call's closing mark
            self._take()
        self._read, self._at_call = self._read_answer, True
        return []

    def _read_notation(self, last: bool) -> list[Delta]:
        """Read a whole call in Gemma's notation."""
        assert self._format is not None
        quote, tail = self._format.quote, self._format.tail
        head = re.match(self._format.head, self._held)
        assert head is not None
        parts = self._held[head.end() - 1 :].split(quote)  # every second one is a string
        ends = ((i, re.search(tail, parts[i])) for i in range(0, len(parts), 2))
        i, end = next(((i, end) for i, end in ends if end is not None), (0, None))
        if end is None and not last:
            return []
        arguments = end and _to_json([*parts[:i], parts[i][: end.start()]])
        self._read, self._at_call = self._read_answer, bool(arguments)
        if end is None or not arguments:
            return [Content(self._take(head.end()))]
        self._held = quote.join([parts[i][end.end() :], *parts[i + 1 :]])
        return [self._start(head[1]), CallArguments(self._n_calls - 1, arguments)]


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


_BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:')


def _to_json(parts: Sequence[str]) -> str | None:
    """Gemma's notation as JSON. Every second part is a string, the others are what is around them.
    None if the result is not an object."""
    text = "".join(
        json.dumps(part) if i % 2 else _BARE_KEY.sub(r'\1"\2":', part)
        for i, part in enumerate(parts)
    )
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


class _JsonEnd:
    """Finds the end of a JSON object in a stream."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Where the object ends in the next part of it; None if it goes on."""
        for i, character in enumerate(text):
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
                    return i + 1
        return None
