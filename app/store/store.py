"""The chats of all owners: the operations that the page's routes and jobs use.

Calls come from any thread and wait for the database's thread. Owners never see each other's chats:
NoSuchChat is raised as if they did not exist. What was deleted can be restored for a day.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

import platformdirs

from app.store import exports, imports, search
from app.store.database import Database
from app.store.records import Chat, Hit, Imported, NoSuchChat, Preset, Role, State, StoreError, Turn
from app.store.rows import (
    BELOW,
    chat_of,
    clean,
    fold,
    get_chat,
    get_turn,
    insert_chat,
    insert_turn,
    latest_below,
    live_turns,
    new_id,
    path_to,
    set_fields,
    steps_of,
    title_of,
)
from app.store.schema import FOLDED, SCHEMA, VERSION

KEEP_DELETED = 24 * 3600.0  # seconds
PURGE_SECONDS = 600.0  # between looks for what was deleted longer ago
MOST_STEP_BYTES = 256_000_000
P = ParamSpec("P")
T = TypeVar("T")


def default_file() -> Path:
    """Where this user's chats are."""
    return platformdirs.user_data_path("speculation", appauthor=False) / "chats.db"


def _runs(
    method: Callable[Concatenate[Store, Connection, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """Run the method in the database's thread, in one transaction."""

    @functools.wraps(method)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.run(lambda db: method(self, db, *args, **kwargs))

    return call


class Store:
    """Chats in a file, or in memory alone if ``path`` is ``:memory:``.

    notice           what the user should know about the file's opening; else empty
    most_step_bytes  of the steps of all replies; the oldest replies' go first
    address          of the server's page, for who opens the file while it is in use
    first_turn       the least id of a turn, so that two stores can have different ones
    Raises StoreError if the file cannot be opened or a newer version wrote it, and InUse.
    """

    def __init__(
        self,
        path: Path | str,
        address: str = "",
        *,
        most_step_bytes: int = MOST_STEP_BYTES,
        first_turn: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = Database(path, SCHEMA, VERSION, address)
        self.notice = ""
        self._most_step_bytes = most_step_bytes
        self._first_turn = first_turn
        self._clock = clock
        self._begin()
        self.purge()
        self._closing = threading.Event()
        threading.Thread(target=self._keep_purging, daemon=True).start()

    async def transaction(self, work: Callable[[Store], T]) -> T:
        """What ``work`` returns: calls of this store, all of them in one transaction."""
        return await asyncio.wrap_future(self.database.submit(lambda _: work(self)))

    def close(self) -> None:
        self._closing.set()
        self.database.close()

    def _keep_purging(self) -> None:
        while not self._closing.wait(PURGE_SECONDS):
            with suppress(StoreError, RuntimeError):  # such as a locked file; it is being closed
                self.purge()

    def purge(self) -> None:
        """Remove what was deleted more than KEEP_DELETED ago from the file, to the last byte."""
        if self._purge():
            self.database.forget()

    @_runs
    def _purge(self, db: Connection) -> int:
        """Returns the number of chats and turns that went."""
        query, before = "DELETE FROM {} WHERE deleted_at < ?", (self._clock() - KEEP_DELETED,)
        return sum(db.execute(query.format(one), before).rowcount for one in ("turns", "chats"))

    @_runs
    def _begin(self, db: Connection) -> None:
        """Mark the replies that a server left running."""
        damaged = self.database.damaged
        if damaged is not None:
            recovered = damaged.with_name(damaged.name.replace("damaged", "recovered"))
            self.notice = (
                f"The file of your chats was damaged. It is now {damaged}. To recover what can be "
                f'read, run sqlite3 "{damaged}" .dump | sed "s/^ROLLBACK.*/COMMIT;/" | sqlite3 '
                f'"{recovered}" and start with --chats "{recovered}".'
            )
        if self._first_turn > 1:
            query = "INSERT INTO sqlite_sequence (name, seq) VALUES ('turns', ? - 1)"
            db.execute(query, (self._first_turn,))
        db.execute(f"{FOLDED} WHERE state = 'running'")
        db.execute("UPDATE turns SET state = 'interrupted' WHERE state = 'running'")

    # Chats

    @_runs
    def chats(
        self, db: Connection, owner: str, *, before: str | None = None, limit: int = 100
    ) -> list[Chat]:
        """Pinned ones first, then the latest; those listed after the chat ``before``."""
        query = """SELECT * FROM chats WHERE owner = :owner AND deleted_at IS NULL
            AND (:before IS NULL OR (is_pinned, changed_at, number) <
                (SELECT is_pinned, changed_at, number FROM chats WHERE id = :before))
            ORDER BY is_pinned DESC, changed_at DESC, number DESC LIMIT :limit"""
        asked = {"owner": owner, "before": before, "limit": limit}
        return [chat_of(row) for row in db.execute(query, asked)]

    @_runs
    def chat(self, db: Connection, chat: str, owner: str) -> Chat:
        return get_chat(db, chat, owner)

    @_runs
    def new_chat(self, db: Connection, owner: str, settings: Mapping[str, Any]) -> Chat:
        now = self._clock()
        chat = Chat(new_id(), owner, "", False, now, now, False, settings, None)
        insert_chat(db, chat)
        return chat

    @_runs
    def change_chat(
        self,
        db: Connection,
        chat: str,
        owner: str,
        *,
        title: str | None = None,
        is_pinned: bool | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Change what is not None. With an empty title, the first message gives it again."""
        get_chat(db, chat, owner)
        if title is not None:
            given = title.strip()
            title = given or title_of(live_turns(db, chat))
            set_fields(db, "chats", chat, title=title, is_named=bool(given))
        if is_pinned is not None:
            set_fields(db, "chats", chat, is_pinned=is_pinned)
        if settings is not None:
            set_fields(db, "chats", chat, settings=settings)
        return get_chat(db, chat, owner)

    @_runs
    def suggest_title(self, db: Connection, chat: str, owner: str, title: str) -> Chat:
        """Give a chat a title, unless the user did."""
        if not get_chat(db, chat, owner).is_named:
            set_fields(db, "chats", chat, title=title)
        return get_chat(db, chat, owner)

    @_runs
    def delete_chat(self, db: Connection, chat: str, owner: str) -> Chat:
        get_chat(db, chat, owner)
        set_fields(db, "chats", chat, deleted_at=self._clock())
        return get_chat(db, chat, owner, deleted=True)

    @_runs
    def restore_chat(self, db: Connection, chat: str, owner: str) -> Chat:
        get_chat(db, chat, owner, deleted=True)
        set_fields(db, "chats", chat, deleted_at=None)
        return get_chat(db, chat, owner)

    @_runs
    def duplicate(self, db: Connection, chat: str, owner: str, turn: int) -> Chat:
        """A new chat with the turns up to ``turn``."""
        get_turn(db, turn, owner, chat=chat)
        found, now = get_chat(db, chat, owner), self._clock()
        about = {"title": f"{found.title} (copy)", "is_named": True, "is_pinned": False}
        times = {"created_at": now, "changed_at": now}
        copy = Chat(**{**vars(found), **about, **times, "id": new_id(), "leaf": turn})
        turns = [
            replace(one, state="interrupted") if one.state == "running" else one
            for one, _ in path_to(db, turn)
        ]
        insert_chat(db, copy, turns, steps_of(db, chat))
        self._drop_steps(db)
        return get_chat(db, copy.id, owner)

    @_runs
    def answers(
        self, db: Connection, chat: str, owner: str, new: Mapping[str, bool] | None = None
    ) -> dict[str, bool]:
        """The owner's answers to all calls of a tool in a chat; from now on ``new``, if given."""
        get_chat(db, chat, owner)
        if new is not None:
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (chat, json.dumps(new)))
        row = db.execute("SELECT by_tool FROM answers WHERE chat = ?", (chat,)).fetchone()
        return {} if row is None else dict(json.loads(row["by_tool"]))

    # Turns

    @_runs
    def path(
        self,
        db: Connection,
        chat: str,
        owner: str,
        leaf: int | None = None,
        *,
        before: int | None = None,
        limit: int | None = None,
    ) -> list[tuple[Turn, tuple[int, ...]]]:
        """The turns from the first to ``leaf`` (else the chat's own), each with its siblings' ids,
        its own among them; the last ``limit`` of them before the turn ``before``."""
        last = get_chat(db, chat, owner).leaf
        if leaf is not None:
            last = get_turn(db, leaf, owner, chat=chat).id
        if before is not None:
            last = get_turn(db, before, owner, chat=chat).parent
        return path_to(db, last, limit)

    @_runs
    def turn(self, db: Connection, turn: int, owner: str) -> Turn:
        return get_turn(db, turn, owner)

    @_runs
    def add_turn(
        self,
        db: Connection,
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
        found, now = get_chat(db, chat, owner), self._clock()
        if parent is not None:
            get_turn(db, parent, owner, chat=chat)
        turn = Turn(0, chat, parent, role, text, tuple(files), reply or {}, state, now)
        added = get_turn(db, insert_turn(db, turn), owner)
        set_fields(db, "chats", chat, leaf=added.id, changed_at=now)
        if not found.title:
            set_fields(db, "chats", chat, title=title_of([added]))
        return added

    @_runs
    def save_reply(
        self, db: Connection, turn: int, text: str, reply: Mapping[str, Any], state: State
    ) -> None:
        """Replace what is kept of a reply. Raises NoSuchChat if there is no such turn."""
        if not set_fields(db, "turns", turn, text=text, reply=reply, state=state):
            raise NoSuchChat("turn")
        if state != "running":
            fold(db, turn)

    @_runs
    def choose(self, db: Connection, turn: int, owner: str) -> Chat:
        """Show the branch with the latest turn below this one."""
        found = get_turn(db, turn, owner)
        set_fields(db, "chats", found.chat, leaf=latest_below(db, turn))
        return get_chat(db, found.chat, owner)

    @_runs
    def delete_turn(self, db: Connection, turn: int, owner: str) -> Chat:
        """Delete a turn and what follows it. If the branch that is shown had it, the latest
        sibling's is shown instead, else the one that ends with the parent."""
        found = get_turn(db, turn, owner)
        query = f"UPDATE turns SET deleted_at = ? WHERE deleted_at IS NULL AND id IN ({BELOW})"
        db.execute(query, (self._clock(), turn))
        shown = get_chat(db, found.chat, owner).leaf
        if shown in (row["id"] for row in db.execute(BELOW, (turn,))):
            query = """SELECT max(id) FROM turns
                WHERE chat = ? AND parent IS ? AND deleted_at IS NULL"""
            sibling = db.execute(query, (found.chat, found.parent)).fetchone()[0]
            leaf = found.parent if sibling is None else latest_below(db, sibling)
            set_fields(db, "chats", found.chat, leaf=leaf)
        return get_chat(db, found.chat, owner)

    @_runs
    def restore_turn(self, db: Connection, turn: int, owner: str) -> Chat:
        """Undo ``delete_turn``, and show the branch again."""
        found = get_turn(db, turn, owner, deleted=True)
        if found.parent is not None:
            get_turn(db, found.parent, owner)
        query = f"UPDATE turns SET deleted_at = NULL WHERE deleted_at = ? AND id IN ({BELOW})"
        db.execute(query, (found.deleted_at, turn))
        set_fields(db, "chats", found.chat, leaf=latest_below(db, turn))
        return get_chat(db, found.chat, owner)

    def search(self, owner: str, text: str, limit: int = 50) -> Future[tuple[list[Hit], int]]:
        """Titles, then turns, latest first, with all words of ``text``; and how many there are."""
        return self.database.read(lambda db: search.find(db, owner, text, limit))

    # Presets

    @_runs
    def presets(self, db: Connection, owner: str) -> list[Preset]:
        rows = db.execute("SELECT * FROM presets WHERE owner = ? ORDER BY name", (owner,))
        return [Preset(row["id"], row["name"], json.loads(row["settings"])) for row in rows]

    @_runs
    def save_preset(
        self, db: Connection, owner: str, name: str, settings: Mapping[str, Any]
    ) -> Preset:
        """Add a preset, or replace the owner's preset of that name."""
        name = clean(name.strip())
        db.execute(
            """INSERT INTO presets (owner, name, settings) VALUES (?, ?, ?)
            ON CONFLICT (owner, name) DO UPDATE SET settings = excluded.settings""",
            (owner, name, json.dumps(settings)),
        )
        query = "SELECT id FROM presets WHERE owner = ? AND name = ?"
        return Preset(db.execute(query, (owner, name)).fetchone()[0], name, dict(settings))

    @_runs
    def delete_preset(self, db: Connection, owner: str, preset: int) -> None:
        done = db.execute("DELETE FROM presets WHERE owner = ? AND id = ?", (owner, preset))
        if not done.rowcount:
            raise NoSuchChat("preset")

    # Steps

    @_runs
    def save_steps(self, db: Connection, turn: int, blob: bytes) -> None:
        """Keep a reply's steps, and drop the oldest replies' if all exceed the limit."""
        query = "INSERT OR REPLACE INTO steps SELECT id, ? FROM turns WHERE id = ?"
        if not db.execute(query, (blob, turn)).rowcount:
            raise NoSuchChat("turn")
        self._drop_steps(db)

    def _drop_steps(self, db: Connection) -> None:
        db.execute(
            """DELETE FROM steps WHERE turn IN (SELECT turn FROM (
                SELECT turn, sum(length(records)) OVER (ORDER BY turn DESC) AS total FROM steps
            ) WHERE total > ?)""",
            (self._most_step_bytes,),
        )

    @_runs
    def steps(self, db: Connection, turn: int, owner: str) -> bytes | None:
        """A reply's steps; None if it has none, or if they were dropped."""
        get_turn(db, turn, owner)
        row = db.execute("SELECT records FROM steps WHERE turn = ?", (turn,)).fetchone()
        return None if row is None else bytes(row["records"])

    # Export and import

    def export_json(self, owner: str, chat: str | None = None) -> Iterator[str]:
        """A chat, or all of the owner's, each with all of its turns and their steps, as a JSON file
        in parts. The store is asked for each chat when its part comes."""
        ids = self._ids(owner) if chat is None else [chat]
        yield from exports.as_json(self._export(one, owner) for one in ids)

    @_runs
    def _ids(self, db: Connection, owner: str) -> list[str]:
        query = "SELECT id FROM chats WHERE owner = ? AND deleted_at IS NULL ORDER BY number"
        return [row["id"] for row in db.execute(query, (owner,))]

    @_runs
    def _export(self, db: Connection, chat: str, owner: str) -> dict[str, Any]:
        found = get_chat(db, chat, owner, deleted=True)  # deleted since the first was exported
        return exports.as_dict(found, live_turns(db, chat), steps_of(db, chat))

    @_runs
    def as_markdown(self, db: Connection, chat: str, owner: str) -> str:
        """The branch of a chat that is shown, as a Markdown document."""
        found = get_chat(db, chat, owner)
        return exports.as_markdown(found, [turn for turn, _ in path_to(db, found.leaf)])

    def add(self, owner: str, found: Iterable[imports.Found | str]) -> Imported:
        """Add chats of an export, each as a whole or not at all; texts say why others are
        refused."""
        done = [one if isinstance(one, str) else self._add(owner, one) for one in found]
        chats = tuple(one for one in done if isinstance(one, Chat))
        return Imported(chats, done.count(None), tuple(one for one in done if isinstance(one, str)))

    @_runs
    def _add(self, db: Connection, owner: str, found: imports.Found) -> Chat | None:
        """Add a chat; None if it is there already, or was deleted and is now restored."""
        origin = imports.origin(found.source, found.turns)
        rows = db.execute(
            "SELECT id, owner, origin FROM chats WHERE id = ? OR (owner = ? AND origin = ?)",
            (found.chat.id, owner, origin),
        ).fetchall()
        for row in (row for row in rows if row["owner"] == owner):
            turns = live_turns(db, row["id"])
            if origin in (row["origin"], imports.origin(found.source, turns)):
                set_fields(db, "chats", row["id"], deleted_at=None)
                return None
        is_free = found.chat.id and all(row["id"] != found.chat.id for row in rows)
        chat = replace(
            found.chat,
            id=found.chat.id if is_free else new_id(),
            owner=owner,
            title=found.chat.title or title_of(found.turns),
        )
        insert_chat(db, chat, found.turns, found.steps, origin)
        self._drop_steps(db)
        return get_chat(db, chat.id, owner)
