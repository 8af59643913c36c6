"""Full-text search in titles and turns."""

from __future__ import annotations

import re
import sqlite3

from app.store.records import Hit
from app.store.rows import chat_of, clean

SNIPPET_WORDS = 16
_MARK = "\x1f"
# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana and Han. And Hangul: its
# words join others and end in particles.
_LETTERS = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3130-\u318f\u3400-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
# Before such a letter, which takes its vowel signs with it, and before another letter after one.
_SPLIT = re.compile(rf"(?=[{_LETTERS}])(?=\w)|(?<=[{_LETTERS}])(?=\w)")
_LIVE = "chats.owner = ? AND chats.deleted_at IS NULL"
_SNIPPET = "snippet({table}, 0, char(2), char(3), '…', {n}) AS snippet"
_TITLES = f"""SELECT chats.*, NULL AS turn, {_SNIPPET.format(table="titles", n=SNIPPET_WORDS)}
FROM titles JOIN chats ON chats.number = titles.rowid
WHERE titles MATCH ? AND {_LIVE} ORDER BY changed_at DESC LIMIT ?"""
_TEXTS = f"""SELECT chats.*, turns.id AS turn, {_SNIPPET.format(table="texts", n=SNIPPET_WORDS)}
FROM texts JOIN turns ON turns.id = texts.rowid JOIN chats ON chats.id = turns.chat
WHERE texts MATCH ? AND {_LIVE} AND turns.deleted_at IS NULL
ORDER BY texts.rowid DESC LIMIT ?"""


def split(text: str) -> str:
    """The text with marks that make a word of each of these letters.

    >>> split("in 東京2020").split("\x1f")
    ['in ', '東', '京', '2020']
    """
    return _SPLIT.sub(_MARK, text)


def find(db: sqlite3.Connection, owner: str, text: str, limit: int) -> list[Hit]:
    """Titles, then turns, latest first, with all words of ``text``, the last as a prefix.

    A chat is found with a snippet once: its title is often the beginning of its first message.
    """
    # Quoted, a word is text alone: FTS5's operators and marks in it mean nothing. One that was
    # split is a phrase.
    words = [split(word).replace('"', '""') for word in clean(text).replace("\0", " ").split()]
    if not words:
        return []
    query = " ".join(f'"{word}"' for word in words) + "*"
    hits: dict[tuple[str, str], Hit] = {}
    for statement in (_TITLES, _TEXTS):
        for row in db.execute(statement, (query, owner, limit - len(hits))):
            hit = Hit(chat_of(row), row["turn"], _shown(row["snippet"]))
            hits[hit.chat.id, hit.snippet] = hit
    return list(hits.values())


def _shown(snippet: str) -> str:
    """The snippet as the text has it; without marks of words if the text itself has such ones."""
    snippet = snippet.replace(_MARK, "")
    marks = [mark for mark in snippet if mark in "\2\3"]
    if marks == ["\2", "\3"] * (len(marks) // 2):
        return snippet
    return snippet.replace("\2", "").replace("\3", "")
