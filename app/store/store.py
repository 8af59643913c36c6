"""The chats of all owners: the operations that the page's routes and jobs use.

Calls come from any thread and wait for the database's thread. Owners never see each other's chats:
NoSuchChat is raised as if they did not exist. What was deleted can be restored for a day.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs

from app.store import exports, imports, search
from app.store.database import Database, Work
from app.store.records import (
    Chat,
    Hit,
    Imported,
    NoSuchChat,
    Preset,
    Role,
    State,
    Turn,
)
from app.store.rows import (
    BELOW,
    chat_of,
    clean,
    get_chat,
    get_turn,
    insert_chat,
    insert_turn,
    insert_turns,
    latest_below,
    live_turns,
    new_id,
    set_fields,
    steps_of,
    title_of,
    turn_of,
)
from app.store.schema import SCHEMA

KEEP_DELETED = 24 * 3600.0  # seconds
MOST_STEP_BYTES = 256_000_000
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


def default_file() -> Path:
    """Where this user's chats are."""
    return platformdirs.user_data_path("speculation", appauthor=False) / "chats.db"


class Store:
    """Chats in a file, or in memory alone if ``path`` is ``:memory:``.

    notice           what the user should know about the file's opening; else empty
    most_step_bytes  of the steps of all replies; the oldest replies' go first
    first_turn       the least id of a turn, so that two stores can have different ones
    Raises StoreError if the file cannot be opened or a newer version wrote it.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        most_step_bytes: int = MOST_STEP_BYTES,
        first_turn: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(path, SCHEMA)
        self._read, self._write = self._database.read, self._database.write
        self._most_step_bytes = most_step_bytes
        self._first_turn = first_turn
        self._clock = clock
        self.notice = self._database.notice
        self._interrupted = self._write(self._begin)

    def close(self) -> None:
        self._database.close()

    def _begin(self, db: sqlite3.Connection) -> list[Turn]:
        """Purge what was deleted long ago and mark the replies that a server left running."""
        for table in ("chats", "turns"):
            deleted_before = self._clock() - KEEP_DELETED
            db.execute(f"DELETE FROM {table} WHERE deleted_at < ?", (deleted_before,))
        if self._first_turn > 1:
            last = self._first_turn - 1
            db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('turns', ?)", (last,))
        # Of a second server's running replies too: its next save marks them as running again.
        found = [turn_of(row) for row in db.execute("SELECT * FROM turns WHERE state = 'running'")]
        db.execute("UPDATE turns SET state = 'interrupted' WHERE state = 'running'")
        return [replace(turn, state="interrupted") for turn in found]

    def interrupted(self) -> list[Turn]:
        """The replies that were still running when the last server ended."""
        return self._interrupted

    # Chats

    def chats(
        self, owner: str, *, folder: str | None = None, before: str | None = None, limit: int = 100
    ) -> list[Chat]:
        """Pinned ones first, then the latest; those listed after the chat ``before``.

        ``folder`` empty: those in no folder; None: all.
        """
        query = """SELECT * FROM chats WHERE owner = :owner AND deleted_at IS NULL
            AND (:folder IS NULL OR folder = :folder)
            AND (:before IS NULL OR (is_pinned, changed_at, number) <
                (SELECT is_pinned, changed_at, number FROM chats WHERE id = :before))
            ORDER BY is_pinned DESC, changed_at DESC, number DESC LIMIT :limit"""
        asked = {"owner": owner, "folder": folder, "before": before, "limit": limit}
        return self._read(lambda db: [chat_of(row) for row in db.execute(query, asked)])

    def folders(self, owner: str) -> list[str]:
        query = """SELECT DISTINCT folder FROM chats
            WHERE owner = ? AND deleted_at IS NULL AND folder != '' ORDER BY folder"""
        return self._read(lambda db: [row[0] for row in db.execute(query, (owner,))])

    def chat(self, chat: str, owner: str) -> Chat:
        return self._read(lambda db: get_chat(db, chat, owner))

    def new_chat(self, owner: str, settings: Mapping[str, Any], title: str = "") -> Chat:
        now = self._clock()
        chat = Chat(
            new_id(), owner, title.strip(), bool(title.strip()), now, now, False, "", settings, None
        )

        def work(db: sqlite3.Connection) -> Chat:
            insert_chat(db, chat)
            return get_chat(db, chat.id, owner)

        return self._write(work)

    def change_chat(
        self,
        chat: str,
        owner: str,
        *,
        title: str | None = None,
        is_pinned: bool | None = None,
        folder: str | None = None,
        settings: Mapping[str, Any] | None = None,
        leaf: int | None = None,
    ) -> Chat:
        """Change what is not None. With an empty title, the first message gives it again."""

        def work(db: sqlite3.Connection) -> Chat:
            found = get_chat(db, chat, owner)
            if leaf is not None:
                get_turn(db, leaf, owner, chat=chat)
                set_fields(db, chat, leaf=leaf)
            if title is not None:
                first = next(iter(live_turns(db, chat)), None)
                automatic = title_of(first.text, first.files) if first is not None else ""
                given = clean(title.strip())
                set_fields(db, chat, title=given or automatic, is_named=bool(given))
            set_fields(
                db,
                chat,
                is_pinned=found.is_pinned if is_pinned is None else is_pinned,
                folder=found.folder if folder is None else clean(folder.strip()),
                settings=json.dumps(found.settings if settings is None else settings),
            )
            return get_chat(db, chat, owner)

        return self._write(work)

    def delete_chat(self, chat: str, owner: str) -> Chat:
        return self._mark_chat(chat, owner, self._clock())

    def restore_chat(self, chat: str, owner: str) -> Chat:
        return self._mark_chat(chat, owner, None)

    def _mark_chat(self, chat: str, owner: str, deleted_at: float | None) -> Chat:
        def work(db: sqlite3.Connection) -> Chat:
            get_chat(db, chat, owner, deleted=deleted_at is None)
            set_fields(db, chat, deleted_at=deleted_at)
            return get_chat(db, chat, owner, deleted=True)

        return self._write(work)

    def duplicate(self, chat: str, owner: str, turn: int) -> Chat:
        """A new chat with the turns up to ``turn``."""

        def work(db: sqlite3.Connection) -> Chat:
            get_turn(db, turn, owner, chat=chat)
            found = get_chat(db, chat, owner)
            rows = db.execute(_PATH, (turn, -1)).fetchall()
            turns = [_ended(turn_of(row)) for row in reversed(rows)]
            now, title = self._clock(), f"{found.title} (copy)"
            copy = replace(
                found,
                id=new_id(),
                title=title,
                is_named=True,
                created_at=now,
                changed_at=now,
                is_pinned=False,
                leaf=turn,
            )
            insert_chat(db, copy)
            insert_turns(db, copy, turns, steps_of(db, chat))
            return get_chat(db, copy.id, owner)

        return self._write(work)

    # Turns

    def path(
        self,
        chat: str,
        owner: str,
        leaf: int | None = None,
        *,
        before: int | None = None,
        limit: int | None = None,
    ) -> list[tuple[Turn, tuple[int, ...]]]:
        """The turns from the first to ``leaf`` (else the chat's own), each with its siblings' ids,
        its own among them; the last ``limit`` of them before the turn ``before``."""

        def work(db: sqlite3.Connection) -> list[tuple[Turn, tuple[int, ...]]]:
            last = get_chat(db, chat, owner).leaf
            if leaf is not None:
                last = get_turn(db, leaf, owner, chat=chat).id
            if before is not None:
                last = get_turn(db, before, owner, chat=chat).parent
            rows = db.execute(_PATH, (last, -1 if limit is None else limit)).fetchall()
            return [(turn_of(row), tuple(json.loads(row["siblings"]))) for row in reversed(rows)]

        return self._read(work)

    def turn(self, turn: int, owner: str) -> Turn:
        return self._read(lambda db: get_turn(db, turn, owner))

    def add_turn(
        self,
        chat: str,
        owner: str,
        parent: int | None,
        role: Role,
        text: str,
        files: Sequence[Mapping[str, Any]] = (),
        reply: Mapping[str, Any] | None = None,
        state: State = "done",
    ) -> Turn:
        """Add a turn below ``parent``; it becomes the chat's leaf."""

        def work(db: sqlite3.Connection) -> Turn:
            found = get_chat(db, chat, owner)
            if parent is not None:
                get_turn(db, parent, owner, chat=chat)
            now = self._clock()
            turn = Turn(0, chat, parent, role, text, tuple(files), reply or {}, state, now)
            added = insert_turn(db, turn)
            set_fields(db, chat, leaf=added, changed_at=now)
            if not found.title:
                set_fields(db, chat, title=title_of(clean(text), files))
            return get_turn(db, added, owner)

        return self._write(work)

    def save_reply(self, turn: int, text: str, reply: Mapping[str, Any], state: State) -> None:
        """Replace what is kept of a reply. Raises NoSuchChat if there is no such turn."""

        def work(db: sqlite3.Connection) -> None:
            done = db.execute(
                "UPDATE turns SET text = ?, reply = ?, state = ? WHERE id = ?",
                (clean(text), json.dumps(reply), state, turn),
            )
            if not done.rowcount:
                raise NoSuchChat("turn")

        self._write(work)

    def choose(self, turn: int, owner: str) -> Chat:
        """Show the branch with the latest turn below this one."""

        def work(db: sqlite3.Connection) -> Chat:
            found = get_turn(db, turn, owner)
            set_fields(db, found.chat, leaf=latest_below(db, turn))
            return get_chat(db, found.chat, owner)

        return self._write(work)

    def delete_turn(self, turn: int, owner: str) -> Chat:
        """Delete a turn and what follows it. If the branch that is shown had it, the latest
        sibling's is shown instead, else the one that ends with the parent."""

        def work(db: sqlite3.Connection) -> Chat:
            found = get_turn(db, turn, owner)
            db.execute(
                f"UPDATE turns SET deleted_at = ? WHERE deleted_at IS NULL AND id IN ({BELOW})",
                (self._clock(), turn),
            )
            query = """SELECT max(id) FROM turns
                WHERE chat = ? AND parent IS ? AND deleted_at IS NULL"""
            leaf = get_chat(db, found.chat, owner).leaf
            if leaf in (row["id"] for row in db.execute(BELOW, (turn,))):
                sibling = db.execute(query, (found.chat, found.parent)).fetchone()[0]
                leaf = latest_below(db, sibling) if sibling is not None else found.parent
                set_fields(db, found.chat, leaf=leaf)
            return get_chat(db, found.chat, owner)

        return self._write(work)

    def restore_turn(self, turn: int, owner: str) -> Chat:
        """Undo ``delete_turn``, and show the branch again."""

        def work(db: sqlite3.Connection) -> Chat:
            found = get_turn(db, turn, owner, deleted=True)
            if found.parent is not None:
                get_turn(db, found.parent, owner)
            db.execute(
                f"UPDATE turns SET deleted_at = NULL WHERE deleted_at = ? AND id IN ({BELOW})",
                (found.deleted_at, turn),
            )
            set_fields(db, found.chat, leaf=latest_below(db, turn))
            return get_chat(db, found.chat, owner)

        return self._write(work)

    # Search

    def search(self, owner: str, text: str, limit: int = 50) -> list[Hit]:
        """Titles, then turns, that have all words of ``text``; the last may be incomplete."""
        return self._read(lambda db: search.find(db, owner, text, limit))

    # Presets

    def presets(self, owner: str) -> list[Preset]:
        query = "SELECT * FROM presets WHERE owner = ? ORDER BY name"

        def work(db: sqlite3.Connection) -> list[Preset]:
            rows = db.execute(query, (owner,))
            return [Preset(row["id"], row["name"], json.loads(row["settings"])) for row in rows]

        return self._read(work)

    def save_preset(self, owner: str, name: str, settings: Mapping[str, Any]) -> Preset:
        """Add a preset, or replace the owner's preset of that name."""
        name = clean(name.strip())

        def work(db: sqlite3.Connection) -> Preset:
            db.execute(
                """INSERT INTO presets (owner, name, settings) VALUES (?, ?, ?)
                ON CONFLICT (owner, name) DO UPDATE SET settings = excluded.settings""",
                (owner, name, json.dumps(settings)),
            )
            query = "SELECT id FROM presets WHERE owner = ? AND name = ?"
            found = db.execute(query, (owner, name)).fetchone()[0]
            return Preset(found, name, dict(settings))

        return self._write(work)

    def delete_preset(self, owner: str, preset: int) -> None:
        def work(db: sqlite3.Connection) -> None:
            done = db.execute("DELETE FROM presets WHERE owner = ? AND id = ?", (owner, preset))
            if not done.rowcount:
                raise NoSuchChat("preset")

        self._write(work)

    # Steps

    def save_steps(self, turn: int, blob: bytes) -> None:
        """Keep a reply's steps, and drop the oldest replies' if all exceed the limit."""

        def work(db: sqlite3.Connection) -> None:
            if db.execute("SELECT 1 FROM turns WHERE id = ?", (turn,)).fetchone() is None:
                raise NoSuchChat("turn")
            db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (turn, blob))
            self._drop_steps(db)

        self._write(work)

    def _drop_steps(self, db: sqlite3.Connection) -> None:
        db.execute(
            """DELETE FROM steps WHERE turn IN (SELECT turn FROM (
                SELECT turn, sum(length(records)) OVER (ORDER BY turn DESC) AS total FROM steps
            ) WHERE total > ?)""",
            (self._most_step_bytes,),
        )

    def steps(self, turn: int, owner: str) -> bytes | None:
        """A reply's steps; None if it has none, or if they were dropped."""

        def work(db: sqlite3.Connection) -> bytes | None:
            get_turn(db, turn, owner)
            row = db.execute("SELECT records FROM steps WHERE turn = ?", (turn,)).fetchone()
            return None if row is None else bytes(row["records"])

        return self._read(work)

    # Export and import

    def export(self, owner: str, chat: str | None = None) -> Iterator[dict[str, Any]]:
        """A chat, or all of the owner's, each with all of its turns and their steps."""
        query = """SELECT id FROM chats WHERE owner = ? AND deleted_at IS NULL
            ORDER BY changed_at, number"""
        if chat is not None:
            ids = [self.chat(chat, owner).id]
        else:
            ids = self._read(lambda db: [row[0] for row in db.execute(query, (owner,))])
        for one in ids:
            yield self._read(self._export(one, owner))

    def _export(self, chat: str, owner: str) -> Work[dict[str, Any]]:
        return lambda db: exports.as_dict(
            get_chat(db, chat, owner), live_turns(db, chat), steps_of(db, chat)
        )

    def export_json(self, owner: str, chat: str | None = None) -> Iterator[str]:
        """The same as a JSON file, in parts."""
        return exports.as_json(self.export(owner, chat))

    def as_markdown(self, chat: str, owner: str) -> str:
        """The branch of a chat that is shown, as a Markdown document."""
        return exports.as_markdown(
            self.chat(chat, owner), [turn for turn, _ in self.path(chat, owner)]
        )

    def import_(self, owner: str, data: object) -> Imported:
        """Add the chats of an export: ours, ChatGPT's, Open WebUI's, or earlier versions'.

        ``data`` is JSON, as text or already read. Each chat is added as a whole or not at all.
        Raises StoreError if it is no such export.
        """
        found, refused = imports.read(data, self._clock())
        added = [self._write(partial(self._add, owner=owner, found=one)) for one in found]
        chats = tuple(chat for chat in added if chat is not None)
        return Imported(chats, len(added) - len(chats), tuple(refused))

    def _add(self, db: sqlite3.Connection, owner: str, found: imports.Found) -> Chat | None:
        """Add a chat; None if it is there already, or it was deleted and is now restored."""
        known = db.execute(
            "SELECT id FROM chats WHERE owner = ? AND origin = ?", (owner, found.origin)
        ).fetchone()
        if known is not None:
            set_fields(db, known["id"], deleted_at=None)
            return None
        name = found.chat.id
        there = db.execute("SELECT owner FROM chats WHERE id = ?", (name,)).fetchone()
        if there is not None:
            is_same = imports.origin(found.source, live_turns(db, name)) == found.origin
            if is_same and there["owner"] == owner:
                set_fields(db, name, deleted_at=None)
                return None
        first = found.turns[0] if found.turns else None
        title = found.chat.title or (title_of(first.text, first.files) if first else "")
        added = new_id() if there is not None or not name else name
        chat = replace(found.chat, id=added, owner=owner, title=title)
        insert_chat(db, chat, found.origin)
        insert_turns(db, chat, found.turns, found.steps)
        self._drop_steps(db)
        return get_chat(db, added, owner)


def _ended(turn: Turn) -> Turn:
    return replace(turn, state="interrupted") if turn.state == "running" else turn
