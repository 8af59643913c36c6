"""The database's tables. The statements, separated by blank lines, bring a file of any earlier
version to this one: its tables stay, and what is searched is indexed anew.
"""

VERSION = 3

_TABLES = """
CREATE TABLE IF NOT EXISTS chats (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    title TEXT NOT NULL,
    is_named INTEGER NOT NULL,
    created_at REAL NOT NULL,
    changed_at REAL NOT NULL,
    is_pinned INTEGER NOT NULL DEFAULT 0,
    settings TEXT NOT NULL,
    leaf INTEGER,
    deleted_at REAL,
    origin TEXT
)

CREATE INDEX IF NOT EXISTS chats_in_order ON chats (owner, is_pinned, changed_at)

CREATE INDEX IF NOT EXISTS chats_by_origin ON chats (origin) WHERE origin IS NOT NULL

CREATE TABLE IF NOT EXISTS turns (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chat TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    parent INTEGER REFERENCES turns (id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    text TEXT NOT NULL,
    files TEXT NOT NULL,
    reply TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at REAL NOT NULL,
    deleted_at REAL
)

CREATE INDEX IF NOT EXISTS turns_of_chat ON turns (chat, parent)

CREATE INDEX IF NOT EXISTS turns_by_parent ON turns (parent)

CREATE INDEX IF NOT EXISTS turns_running ON turns (state) WHERE state = 'running'

CREATE TABLE IF NOT EXISTS steps (
    turn INTEGER PRIMARY KEY REFERENCES turns (id) ON DELETE CASCADE,
    records BLOB NOT NULL
)

CREATE TABLE IF NOT EXISTS presets (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    UNIQUE (owner, name)
)
"""

_DROPPED = "\n\n".join(
    f"DROP {kind} IF EXISTS {name}"
    for table in ("titles", "texts")
    for kind, name in (
        *(("TRIGGER", f"{table}_{event}") for event in ("insert", "delete", "update")),
        ("TABLE", table),
        ("VIEW", f"split_{table}"),
    )
)
# A file that was recovered may have lost parts of rows.
_MENDED = """
UPDATE turns SET files = '[]' WHERE NOT json_valid(files)

UPDATE turns SET reply = '{}' WHERE NOT json_valid(reply)

UPDATE chats SET settings = '{}' WHERE NOT json_valid(settings)
"""
# What is searched. ``split`` is ``search.split``.
_INDEX = """
CREATE VIEW split_titles AS SELECT number, split(title) AS title FROM chats

CREATE VIEW split_texts AS SELECT id, split(text) AS text FROM turns WHERE state != 'running'

CREATE VIRTUAL TABLE titles USING fts5 (
    title, content='split_titles', content_rowid='number',
    tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co M*'"
)

CREATE VIRTUAL TABLE texts USING fts5 (
    text, content='split_texts', content_rowid='id', prefix='1 2',
    tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co M*'"
)

CREATE TRIGGER titles_insert AFTER INSERT ON chats BEGIN
    INSERT INTO titles (rowid, title) VALUES (new.number, split(new.title));
END

CREATE TRIGGER titles_delete AFTER DELETE ON chats BEGIN
    INSERT INTO titles (titles, rowid, title) VALUES ('delete', old.number, split(old.title));
END

CREATE TRIGGER titles_update AFTER UPDATE OF title ON chats BEGIN
    INSERT INTO titles (titles, rowid, title) VALUES ('delete', old.number, split(old.title));
    INSERT INTO titles (rowid, title) VALUES (new.number, split(new.title));
END

CREATE TRIGGER texts_insert AFTER INSERT ON turns WHEN new.state != 'running' BEGIN
    INSERT INTO texts (rowid, text) VALUES (new.id, split(new.text));
END

CREATE TRIGGER texts_delete AFTER DELETE ON turns WHEN old.state != 'running' BEGIN
    INSERT INTO texts (texts, rowid, text) VALUES ('delete', old.id, split(old.text));
END

CREATE TRIGGER texts_update AFTER UPDATE OF text, state ON turns BEGIN
    INSERT INTO texts (texts, rowid, text)
        SELECT 'delete', old.id, split(old.text) WHERE old.state != 'running';
    INSERT INTO texts (rowid, text)
        SELECT new.id, split(new.text) WHERE new.state != 'running';
END

INSERT INTO titles (titles) VALUES ('rebuild')

INSERT INTO texts (texts) VALUES ('rebuild')
"""

SCHEMA = "\n\n".join(part.strip() for part in (_TABLES, _DROPPED, _MENDED, _INDEX))
