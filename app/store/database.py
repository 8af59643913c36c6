"""A SQLite file and the one thread that uses it: opening, versions, damage, transactions."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path
from threading import get_ident
from typing import TypeVar

from filelock import FileLock, Timeout

from app.store.records import InUse, StoreError
from app.store.search import folded

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
MEMORY = ":memory:"
BUSY_TIMEOUT = 10.0  # seconds; another program may be reading
_REASONS = {
    "database or disk is full": "the disk is full. Free some space, then try again",
    "database is locked": "another program is using their file",
    "database disk image is malformed": "their file is damaged. Restart the server",
}


class Database:
    """Runs functions in its thread, each in a transaction.

    ``schema`` has the statements that bring a file of any earlier version to ``version``.

    damaged: where a damaged file was moved at the opening; None if there was none.

    One server at a time has the file; it says at ``address`` where. Raises InUse.
    """

    def __init__(self, path: Path | str, schema: str, version: int, address: str = "") -> None:
        self.path = Path(path)
        self._address = address
        self._lock = FileLock(f"{path}.lock", mode=0o600, thread_local=False)
        self.damaged: Path | None = None
        self._in_memory = str(path) == MEMORY
        self._schema, self._version = schema, version
        self._thread, self._reader = ThreadPoolExecutor(1, "chats"), ThreadPoolExecutor(1, "search")
        try:
            self._ident = self._thread.submit(get_ident).result()
            self._connection = self._thread.submit(self._told, self._open).result()
        except BaseException:
            self._thread.shutdown()
            self._lock.release()
            raise

    def run(self, work: Work[T]) -> T:
        """All that ``work`` writes is kept, or nothing of it if it raises. Within another one, it
        is a part of that."""
        return work(self._connection) if get_ident() == self._ident else self.submit(work).result()

    def submit(self, work: Work[T]) -> Future[T]:
        """The same, for who does not wait here."""
        return self._thread.submit(self._told, lambda: _within(self._connection, work))

    def read(self, work: Work[T]) -> Future[T]:
        """What ``work`` finds, in a thread and a connection of its own: no other waits for it."""
        if self._in_memory:
            return self.submit(work)

        def found() -> T:
            address = f"{self.path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
                connection.row_factory = sqlite3.Row
                connection.execute("BEGIN")  # what it sees is of one moment
                return work(connection)

        return self._reader.submit(self._told, found)

    def forget(self) -> None:
        """Leave no byte of what was deleted in the log, unless another program reads it now."""
        query = "PRAGMA wal_checkpoint(TRUNCATE)"
        self._thread.submit(lambda: self._connection.execute(query).fetchall()).result()

    def close(self) -> None:
        self._reader.shutdown()
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()
        self._lock.release()

    def _told(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. Raises StoreError for SQLite's errors."""
        try:
            return work()
        except (sqlite3.Error, OSError) as error:
            reason = _REASONS.get(str(error), str(error))
            raise StoreError(f"Chats cannot be kept in {self.path}: {reason}.") from error

    def _open(self) -> sqlite3.Connection:
        if self._in_memory:
            return self._connect(MEMORY)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = self.path.with_name(f"{self.path.name}.address")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise InUse(self.path, where.read_text(encoding="utf-8")) from None
        _create(where)
        where.write_text(self._address, encoding="utf-8")
        _create(self.path)
        try:
            return self._connect(self.path)
        except sqlite3.OperationalError:  # not damaged: locked, full or not readable
            raise
        except sqlite3.DatabaseError:
            self._move_aside()
            _create(self.path)
            return self._connect(self.path)

    def _connect(self, path: Path | str) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.create_function("folded", 1, folded, deterministic=True)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        newest = self._version
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version == newest:
            return
        if version > newest:
            raise StoreError(
                f"A newer version of this program wrote {self.path} (schema {version}; this one "
                f"reads up to {newest}). Update this program."
            )
        if version and not self._in_memory:
            copy = self.path.with_name(f"{self.path.stem}-v{version}.db")
            copy.unlink(missing_ok=True)
            _create(copy)
            connection.execute("VACUUM INTO ?", (str(copy),))

        def migrate(connection: sqlite3.Connection) -> None:
            for statement in self._schema.split("\n\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {newest}")

        _within(connection, migrate)

    def _move_aside(self) -> None:
        """Rename the damaged file and its log, which belongs to it."""
        date = datetime.now().strftime("%Y-%m-%d-%H%M%S-%f")
        self.damaged = self.path.with_name(f"{self.path.stem}-damaged-{date}.db")
        for suffix in ("", "-wal"):
            source = self.path.with_name(self.path.name + suffix)
            if source.exists():
                source.rename(f"{self.damaged}{suffix}")
        self.path.with_name(f"{self.path.name}-shm").unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Create the file if there is none, so that only its owner can read it."""
    os.close(os.open(path, os.O_CREAT, 0o600))


def _within(connection: sqlite3.Connection, work: Work[T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back if the disk is full
            connection.execute("ROLLBACK")
        raise
    return result
