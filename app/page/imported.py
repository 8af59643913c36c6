"""Exports of chats, read apart from the server."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from app.page.reply import Reply
from app.page.steps import shown
from app.store import imports
from app.store.imports import Found


def chats_of(data: bytes) -> Iterator[Found | str]:
    """The chats of an export, and why others are refused. Raises UnreadableExport."""
    found, refused = imports.read(data, time.time(), _checked)
    yield from found
    yield from refused


def _checked(found: Found) -> Found:
    """The chat with what the page reads of its replies, written anew: a file may say anything."""
    replies = {
        turn.id: Reply.from_json(turn.text, turn.reply).as_json()
        for turn in found.turns
        if turn.role == "assistant"
    }
    turns = [
        replace(turn, reply=replies.get(turn.id, {}), files=tuple(map(_file, turn.files)))
        for turn in found.turns
    ]
    steps = {turn: zlib.compress(shown(kept)) for turn, kept in found.steps.items()}
    return replace(found, turns=turns, steps=steps)


def _file(file: Mapping[str, Any]) -> dict[str, Any]:
    leads = file.get("leads") is not False
    return {"name": file["name"], "text": file["text"], "leads": leads}
