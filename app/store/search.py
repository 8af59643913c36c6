"""Search in titles and turns: a look at each, newest first. A hundred long chats are a megabyte."""

from __future__ import annotations

import re
from sqlite3 import Connection
from unicodedata import combining, normalize

from app.store.records import Hit
from app.store.rows import chat_of

BEFORE, LENGTH = 60, 160  # characters of a snippet, and of those the ones before the first word
_LIVE = "chats.owner = ? AND chats.deleted_at IS NULL"
_TITLES = f"""SELECT *, NULL AS turn, title AS text FROM chats
WHERE {_LIVE} ORDER BY changed_at DESC"""
_TEXTS = f"""SELECT chats.*, turns.id AS turn, text FROM turns JOIN chats ON chats.id = turns.chat
WHERE {_LIVE} AND turns.deleted_at IS NULL AND state != 'running' ORDER BY turns.id DESC"""


class _Bases(dict[int, str]):
    """By a character's number, its small letter without accents."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        parts = normalize("NFD", char)
        small = (parts[0] if all(map(combining, parts[1:])) else char).lower()
        self[number] = small if len(small) == 1 else char
        return self[number]


_bases = _Bases()


def find(db: Connection, owner: str, text: str) -> list[Hit]:
    """Titles, then turns, latest first, that have all words of ``text``, also within others.

    A chat is found with a snippet once: its title is often the beginning of its first message.
    """
    words = sorted(_folded(normalize("NFC", text)).split(), key=len, reverse=True)
    hits: dict[tuple[str, str], Hit] = {}
    for query in (_TITLES, _TEXTS) if words else ():
        for row in db.execute(query, (owner,)):
            if snippet := _snippet(row["text"], words):
                hit = Hit(chat_of(row), row["turn"], snippet)
                hits[hit.chat.id, snippet] = hit
    return list(hits.values())


def _folded(text: str) -> str:
    """The text in small letters without accents, at the same length."""
    return text.lower() if text.isascii() else text.translate(_bases)


def _snippet(text: str, words: list[str]) -> str:
    """The text around the first of the words, with marks; empty if it lacks one of them."""
    text = normalize("NFC", text)
    folded = _folded(text)
    if not all(word in folded for word in words):
        return ""
    pattern = re.compile("|".join(map(re.escape, words)))
    found = pattern.search(folded)
    assert found is not None
    begin = max(0, found.start() - BEFORE)
    end = max(begin + LENGTH, found.end())
    parts, at = ["…" if begin else ""], begin
    for first, last in (one.span() for one in pattern.finditer(folded, found.start(), end)):
        parts += [_plain(text[at:first]), f"\2{_plain(text[first:last])}\3"]
        at = last
    return "".join([*parts, _plain(text[at:end]), "…" if end < len(text) else ""])


def _plain(text: str) -> str:
    """The text without such marks of its own."""
    return text.replace("\2", "").replace("\3", "")
