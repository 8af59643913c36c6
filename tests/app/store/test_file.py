"""The file of chats: private, versioned, and whole after damage, kills and full disks."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.store import InUse, Store, StoreError
from app.store.database import Database
from app.store.schema import SCHEMA, VERSION
from tests.app.store.test_store import search, talk, texts


def test_a_file_and_its_folder_are_private_and_any_thread_may_ask(tmp_path: Path) -> None:
    file = tmp_path / "new" / "chats.db"
    store = Store(file)
    chat, _ = talk(store, "hello")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in [file.parent, *file.parent.iterdir()]]
    assert modes == [0o700, *[0o600] * 5]  # with the log, its index, the lock and the address
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: store.add_turn(chat.id, "", None, "user", str(n)), range(20)))
    store.close()
    store = Store(file)
    turns = store.path(chat.id, "")
    assert len(turns[0][1]) == 21
    store.close()


def test_a_damaged_file_is_moved_aside_with_the_command_that_recovers_it(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    file.write_bytes(b"not a database" * 1000)
    store = Store(file)
    (moved,) = tmp_path.glob("chats-damaged-*.db")
    recovered = moved.with_name(moved.name.replace("damaged", "recovered"))
    command = f'sqlite3 "{moved}" .dump | sed "s/^ROLLBACK.*/COMMIT;/" | sqlite3 "{recovered}"'
    assert store.notice == (
        f"The file of your chats was damaged. It is now {moved}. To recover what can be read, run "
        f'{command} and start with --chats "{recovered}".'
    )
    assert moved.read_bytes() == b"not a database" * 1000
    assert store.chats("") == []
    for n in range(20):
        talk(store, f"chat {n}", "long " * 2000)
    store.close()
    moved.unlink()
    content = bytearray(file.read_bytes())
    content[-len(content) // 4 :] = bytes(len(content) // 4)
    file.write_bytes(content)
    store = Store(file)
    (moved,) = tmp_path.glob("chats-damaged-*.db")
    assert (moved.read_bytes(), store.chats("")) == (bytes(content), [])
    notice = store.notice
    store.close()
    store = Store(file)
    assert store.notice == ""
    store.close()
    if shutil.which("sqlite3") and shutil.which("sed"):
        found = re.search(r'run (.*) and start with --chats "(.*)"\.', notice)
        assert found is not None
        subprocess.run(found[1], shell=True, capture_output=True, check=False)
        store = Store(found[2])
        whole = [chat for chat in store.chats("") if texts(store, chat)[1:] == ["long " * 2000]]
        assert 5 < len(whole) < 20
        assert search(store, "chat") != []
        store.close()


def test_a_newer_version_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    Store(file).close()
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    before = file.read_bytes()
    newer = r"schema 9; this one reads up to 6\). Update this program"
    with pytest.raises(StoreError, match=newer):
        Store(file)
    assert file.read_bytes() == before


def test_a_file_is_copied_before_its_schema_changes_and_a_failed_change_leaves_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "chats.db"
    store = Store(file)
    chat, _ = talk(store, "hello")
    store.close()
    step = "ALTER TABLE chats ADD COLUMN colour TEXT\n\nCREATE TABLE more (id)"
    with pytest.raises(StoreError, match="no such table"):
        Database(file, f"{step}\n\nINSERT INTO nowhere VALUES (1)", VERSION + 1)
    store = Store(file)  # still version 5
    assert texts(store, chat) == ["hello"]
    store.close()
    database = Database(file, step, VERSION + 1)
    rows = database.run(lambda db: db.execute("SELECT title, colour FROM chats").fetchall())
    assert [tuple(row) for row in rows] == [("hello", None)]
    database.close()
    copy = tmp_path / "chats-v6.db"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    store = Store(copy)
    assert texts(store, chat) == ["hello"]
    store.close()


def test_an_earlier_files_chats_are_found_without_its_index(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    store = Store(tmp_path / "new.db")
    _, (ask, reply) = talk(store, "天气很好", "晴")
    store.close()
    Database(file, SCHEMA.partition("DROP")[0].strip(), 3).close()
    with sqlite3.connect(file) as connection:
        connection.execute("ATTACH ? AS new", (str(tmp_path / "new.db"),))
        for table in ("chats", "turns"):
            connection.execute(f"INSERT INTO {table} SELECT * FROM new.{table}")
        connection.execute("CREATE VIEW split_texts AS SELECT id, split(text) AS text FROM turns")
        connection.execute(
            "CREATE VIRTUAL TABLE texts USING fts5 (text, content='split_texts', prefix='1 2')"
        )
        connection.execute(
            "CREATE TRIGGER texts_update AFTER UPDATE OF text ON turns BEGIN "
            "INSERT INTO texts (rowid, text) VALUES (new.id, split(new.text)); END"
        )
    connection.close()
    store = Store(file)
    assert [hit.turn for hit in search(store, "很好")] == [ask]
    store.save_reply(reply, "雨", {}, "done")
    assert [hit.turn for hit in search(store, "雨")] == [reply]
    assert search(store, "晴") == []
    store.close()
    assert (tmp_path / "chats-v3.db").exists()


def test_a_full_disk_refuses_a_message_and_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat, (_, reply) = talk(store, "hello", "reply")

    def set_pages(n: int) -> None:
        store.database.run(lambda db: db.execute(f"PRAGMA max_page_count = {n}").fetchone())

    set_pages(1)  # no page more than there are
    for _ in range(2):
        with pytest.raises(StoreError, match="the disk is full. Free some space, then try again"):
            store.add_turn(chat.id, "", reply, "user", "long " * 10_000)
    assert texts(store, chat) == ["hello", "reply"]
    set_pages(1_000_000)
    store.add_turn(chat.id, "", reply, "user", "long " * 10_000)
    assert texts(store, chat) == ["hello", "reply", "long " * 10_000]
    store.close()


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "chats.db", tmp_path):
        with pytest.raises(StoreError, match=f"Chats cannot be kept in {path}"):
            Store(path)


def test_a_second_server_hears_where_the_first_is(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    first = Store(file, "http://localhost:7860/")
    chat, (ask,) = talk(first, "ask")
    reply = first.add_turn(chat.id, "", ask, "assistant", "", state="running")
    first.save_reply(reply.id, "zebra", {}, "running")
    for _ in range(2):
        with pytest.raises(InUse) as raised:
            Store(file, "http://localhost:7861/")
        assert raised.value.address == "http://localhost:7860/"
    assert first.path(chat.id, "")[1][0].state == "running"
    first.close()
    second = Store(file)
    assert second.path(chat.id, "")[1][0].state == "interrupted"
    assert [hit.turn for hit in search(second, "zebra")] == [reply.id]
    second.close()


# Forks a writer, kills it, and forks the next, which first looks for what the writers before it
# were told is kept. Each line that a writer sends says what it was told: id, text and state.
KILLED = """
import json, os, random, signal, sys, time
from app.store import Store

def check(store, told):
    for id, (text, state) in told.items():
        turn = store.turn(id, "")
        if not turn.text.startswith(text) or turn.state == "running":
            sys.exit(f"lost: {id} {turn}")
        if state == "done" and (turn.text, turn.state) != (text, "done"):
            sys.exit(f"changed: {id} {turn}")

def write(file, told, tell):
    store = Store(file)
    check(store, told)
    chat, parent = store.new_chat("", {}), None
    while True:
        ask = store.add_turn(chat.id, "", parent, "user", "ask")
        tell(ask.id, "ask", "done")
        reply = store.add_turn(chat.id, "", ask.id, "assistant", "", state="running")
        tell(reply.id, "", "running")
        for n in range(1, 9):
            text, state = "word " * n, "done" if n == 8 else "running"
            store.save_reply(reply.id, text, {"n": n}, state)
            tell(reply.id, text, state)
        parent = reply.id

told, file = {}, sys.argv[1]
rng = random.Random(1)
for life in range(20):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        write(file, told, lambda *what: os.write(writing, (json.dumps(what) + "\\n").encode()))
    os.close(writing)
    with open(reading) as lines:
        first = lines.readline()  # it is at work
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        for line in [first, *lines]:
            if line.endswith("\\n"):
                id, text, state = json.loads(line)
                told[id] = (text, state)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        sys.exit("a writer ended by itself")
print(json.dumps(told))
"""


def test_a_killed_server_keeps_all_that_it_said_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    store = Store(file)
    assert store.notice == ""
    assert len(store.chats("")) == 20
    states = set()
    for number, (text, state) in told.items():
        turn = store.turn(int(number), "")
        assert turn.text.startswith(text)
        assert turn.state in (("done",) if state == "done" else ("done", "interrupted"))
        states.add(turn.state)
    assert states == {"done", "interrupted"}
    assert search(store, "word") != []
    store.close()
