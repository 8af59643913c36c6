"""Chats as JSON, which imports read again, and as Markdown."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from app.store.records import Chat, Turn
from speculation.chat.reasoning import find_reasoning

FORMAT = "speculation-chats"
VERSION = 2
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_TICKS = re.compile("`{3,}")


def as_dict(chat: Chat, turns: Sequence[Turn], steps: Mapping[int, bytes]) -> dict[str, Any]:
    """A chat with all of its turns. They are numbered from 0, parents before their children."""
    numbers: dict[int | None, int] = {turn.id: n for n, turn in enumerate(turns)}
    parts = [
        {
            **_without(turn, "id", "chat", "deleted_at"),
            "parent": numbers.get(turn.parent),
            "steps": b64encode(steps[turn.id]).decode() if turn.id in steps else None,
        }
        for turn in turns
    ]
    leaf = numbers.get(chat.leaf)
    return {**_without(chat, "owner", "deleted_at"), "leaf": leaf, "turns": parts}


def _without(record: object, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in names}


def as_json(chats: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A file of chats, in parts."""
    yield f'{{"format": "{FORMAT}", "version": {VERSION}, "chats": ['
    for n, chat in enumerate(chats):
        yield ("\n" if n == 0 else ",\n") + json.dumps(chat)
    yield "\n]}\n"


def as_markdown(chat: Chat, turns: Sequence[Turn]) -> str:
    """The turns as a document, with reasoning folded and files as code blocks."""
    parts = [f"# {chat.title}\n"] if chat.title else []
    for turn in turns:
        if turn.role == "user":
            files = [quoted(file["name"], file["text"]) for file in turn.files]
            parts.append("\n\n".join(["## You", *files, turn.text]).rstrip() + "\n")
        else:
            names = [turn.reply.get("model"), turn.reply.get("method")]
            by = " · ".join(str(name) for name in names if name)
            error = str(turn.reply.get("error") or "")
            calls = turn.reply.get("calls")
            made = quoted("Calls of tools", json.dumps(calls, indent=2, ensure_ascii=False))
            texts = ["## Model", _folded(turn), made if calls else "", error]
            texts.append(f"<sub>{by}</sub>" if by else "")
            parts.append("\n\n".join(filter(None, texts)) + "\n")
    return "\n".join(parts)


def quoted(name: str, text: str) -> str:
    """A file's name, and its text as a code block whose fence is longer than any in its text."""
    fence = "`" * (1 + max((len(found) for found in _TICKS.findall(text)), default=2))
    return f"{name}:\n{fence}\n{text}\n{fence}"


def _folded(turn: Turn) -> str:
    """A reply's text, with its reasoning in a ``<details>`` element."""
    found = find_reasoning(turn.text, str(turn.reply.get("opening") or ""))
    if found is None:
        return _with_code_closed(turn.text)
    reasoning = _with_code_closed(turn.text[found.start : found.end].strip())
    fold = f"<details><summary>Reasoning</summary>\n\n{reasoning}\n\n</details>"
    answer = _with_code_closed(turn.text[found.answer :])
    return "\n\n".join(filter(None, (fold if reasoning else "", answer)))


def _with_code_closed(text: str) -> str:
    """The text, with its last code block closed if it was cut short there."""
    fence = ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        if found is None:
            continue
        if not fence:
            fence = found[1]
        elif found[1].startswith(fence) and not found[2].strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text
