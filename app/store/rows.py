"""Reads chats and turns from the database, and writes them. All of it runs in its thread."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from app.store.records import Chat, NoSuchChat, Turn
from app.store.schema import FOLDED

# The ids of a turn and of all that follow it.
BELOW = """WITH RECURSIVE below (id) AS (
    SELECT ? UNION ALL SELECT turns.id FROM below JOIN turns ON turns.parent = below.id
) SELECT id FROM below"""
# A turn and those before it, from the last to the first, each with its siblings.
_PATH = """WITH RECURSIVE up (id, parent) AS (
    SELECT id, parent FROM turns WHERE id = ?
    UNION ALL SELECT turns.id, turns.parent FROM up JOIN turns ON turns.id = up.parent LIMIT ?
) SELECT turns.*, (
    SELECT json_group_array(id) FROM (
        SELECT id FROM turns AS other WHERE other.chat = turns.chat
        AND other.parent IS turns.parent AND other.deleted_at IS NULL ORDER BY id
    )
) AS siblings FROM up JOIN turns USING (id) ORDER BY id DESC"""
TITLE_LENGTH = 80  # characters


def new_id() -> str:
    return secrets.token_urlsafe(9)


def clean(text: str) -> str:
    """The text without halves of UTF-16 pairs, which SQLite cannot keep."""
    return text.encode("utf-8", "replace").decode()


def _column(value: object) -> object:
    """A field's value as the database keeps it."""
    if isinstance(value, str):
        return clean(value)
    return json.dumps(value) if isinstance(value, Mapping | tuple) else value


def chat_of(row: sqlite3.Row) -> Chat:
    fields = {name: row[name] for name in Chat.__dataclass_fields__}
    fields["settings"] = json.loads(row["settings"])
    flags = {name: bool(row[name]) for name in ("is_named", "is_pinned")}
    return Chat(**{**fields, **flags})


def turn_of(row: sqlite3.Row) -> Turn:
    fields = {name: row[name] for name in Turn.__dataclass_fields__}
    fields["files"] = tuple(json.loads(row["files"]))
    return Turn(**{**fields, "reply": json.loads(row["reply"])})


def get_chat(db: sqlite3.Connection, chat: str, owner: str, *, deleted: bool = False) -> Chat:
    """The owner's chat. Raises NoSuchChat, also if it was deleted and ``deleted`` is not set."""
    row = db.execute("SELECT * FROM chats WHERE id = ? AND owner = ?", (chat, owner)).fetchone()
    if row is None or (row["deleted_at"] is not None and not deleted):
        raise NoSuchChat
    return chat_of(row)


def get_turn(
    db: sqlite3.Connection, turn: int, owner: str, *, chat: str | None = None, deleted: bool = False
) -> Turn:
    """A turn of the owner's chats, or of ``chat``. Raises NoSuchChat as ``get_chat`` does."""
    row = db.execute("SELECT * FROM turns WHERE id = ?", (turn,)).fetchone()
    if row is None or (row["deleted_at"] is not None and not deleted):
        raise NoSuchChat("turn")
    if row["chat"] != get_chat(db, chat or row["chat"], owner).id:
        raise NoSuchChat("turn")
    return turn_of(row)


def set_fields(db: sqlite3.Connection, table: str, id_: str | int, **fields: object) -> bool:
    """Set fields of a chat or turn; returns whether it exists."""
    columns = ", ".join(f"{name} = ?" for name in fields)
    values = map(_column, (*fields.values(), id_))
    return db.execute(f"UPDATE {table} SET {columns} WHERE id = ?", tuple(values)).rowcount > 0


def insert_chat(
    db: sqlite3.Connection,
    chat: Chat,
    turns: Sequence[Turn] = (),
    steps: Mapping[int, bytes] = MappingProxyType({}),
    origin: str | None = None,
) -> None:
    """Insert a chat with its turns, parents before their children. The turns' ids, the chat's leaf
    and the keys of ``steps`` refer only to each other; in the database all get new ids."""
    _insert(db, "chats", {**vars(chat), "leaf": None, "origin": origin})
    new: dict[int | None, int | None] = {None: None}
    for turn in turns:
        new[turn.id] = insert_turn(db, replace(turn, chat=chat.id, parent=new[turn.parent]))
        if turn.id in steps:
            db.execute("INSERT INTO steps VALUES (?, ?)", (new[turn.id], steps[turn.id]))
    set_fields(db, "chats", chat.id, leaf=new[chat.leaf])


def insert_turn(db: sqlite3.Connection, turn: Turn) -> int:
    """Insert a turn, whose id is not used, and return its id."""
    number = _insert(db, "turns", {**vars(turn), "id": None})
    fold(db, number)
    return number


def fold(db: sqlite3.Connection, turn: int) -> None:
    """Let searches find the turn's text."""
    db.execute(f"{FOLDED} WHERE id = ?", (turn,))


def _insert(db: sqlite3.Connection, table: str, fields: Mapping[str, object]) -> int:
    names, marks = ", ".join(fields), ", ".join("?" * len(fields))
    values = tuple(map(_column, fields.values()))
    return int(db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values).lastrowid or 0)


def live_turns(db: sqlite3.Connection, chat: str) -> list[Turn]:
    """All turns that were not deleted, parents before their children."""
    query = "SELECT * FROM turns WHERE chat = ? AND deleted_at IS NULL ORDER BY id"
    return [turn_of(row) for row in db.execute(query, (chat,))]


def latest_below(db: sqlite3.Connection, turn: int) -> int:
    """The latest of a turn and those that follow it: a leaf, since children have later ids."""
    query = f"SELECT max(id) FROM turns WHERE deleted_at IS NULL AND id IN ({BELOW})"
    return int(db.execute(query, (turn,)).fetchone()[0])


def steps_of(db: sqlite3.Connection, chat: str) -> dict[int, bytes]:
    query = "SELECT turn, records FROM steps JOIN turns ON turns.id = turn WHERE chat = ?"
    return {row["turn"]: row["records"] for row in db.execute(query, (chat,))}


def path_to(
    db: sqlite3.Connection, leaf: int | None, limit: int | None = None
) -> list[tuple[Turn, tuple[int, ...]]]:
    """The last ``limit`` turns up to ``leaf``, each with the ids of its siblings and its own."""
    rows = db.execute(_PATH, (leaf, -1 if limit is None else limit)).fetchall()
    return [(turn_of(row), tuple(json.loads(row["siblings"]))) for row in reversed(rows)]


def title_of(turns: Sequence[Turn]) -> str:
    """A chat's title by its first message: the first line, or the name of the first file."""
    lines = [line for turn in turns[:1] for line in turn.text.splitlines()]
    names = [str(file.get("name", "")) for turn in turns[:1] for file in turn.files]
    return next(filter(None, map(str.strip, lines + names)), "")[:TITLE_LENGTH]
