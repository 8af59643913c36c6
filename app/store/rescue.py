"""Copies what can still be read of a damaged file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from app.store.records import Chat, Turn
from app.store.rows import chat_of, insert_chat, live_turns, steps_of

# What damaged rows raise, when they are read and when their fields are.
_DAMAGE = (sqlite3.Error, ValueError, TypeError, KeyError)


def rescue(db: sqlite3.Connection, damaged: Path) -> int:
    """Copy the chats of a damaged file that can be read into an empty one, and count them."""
    n = 0
    with closing(sqlite3.connect(damaged)) as old:
        old.row_factory = sqlite3.Row
        for chat in _chats(old):
            try:
                turns = _joined(live_turns(old, chat.id))
            except _DAMAGE:
                continue
            try:
                steps = steps_of(old, chat.id)
            except _DAMAGE:
                steps = {}
            ids = {turn.id for turn in turns}
            last = turns[-1].id if turns else None
            kept = replace(chat, leaf=chat.leaf if chat.leaf in ids else last)
            insert_chat(db, kept, turns, steps)
            n += 1
    return n


def _chats(old: sqlite3.Connection) -> Iterator[Chat]:
    """Chats up to the first damaged part of their table."""
    try:
        for row in old.execute("SELECT * FROM chats NOT INDEXED WHERE deleted_at IS NULL"):
            yield chat_of(row)
    except _DAMAGE:
        return


def _joined(turns: list[Turn]) -> list[Turn]:
    """The turns; those whose parent is lost follow the turn before them."""
    ids = {None, *(turn.id for turn in turns)}
    before = [None, *(turn.id for turn in turns)]
    return [
        turn if turn.parent in ids else replace(turn, parent=parent)
        for turn, parent in zip(turns, before, strict=False)
    ]
