"""The database's tables, as the steps from each version to the next.

Statements are separated by blank lines. Never change a step that was released: add one.
"""

_FIRST = """
CREATE TABLE chats (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    title TEXT NOT NULL,
    is_named INTEGER NOT NULL,
    created_at REAL NOT NULL,
    changed_at REAL NOT NULL,
    is_pinned INTEGER NOT NULL DEFAULT 0,
    folder TEXT NOT NULL DEFAULT '',
    settings TEXT NOT NULL,
    leaf INTEGER,
    deleted_at REAL,
    origin TEXT
)

CREATE INDEX chats_in_order ON chats (owner, is_pinned, changed_at)

CREATE INDEX chats_by_origin ON chats (origin) WHERE origin IS NOT NULL

CREATE TABLE turns (
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

CREATE INDEX turns_of_chat ON turns (chat, parent)

CREATE INDEX turns_by_parent ON turns (parent)

CREATE INDEX turns_running ON turns (state) WHERE state = 'running'

CREATE TABLE steps (
    turn INTEGER PRIMARY KEY REFERENCES turns (id) ON DELETE CASCADE,
    records BLOB NOT NULL
)

CREATE TABLE presets (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    UNIQUE (owner, name)
)
"""

# Version 1 had an index that split no text.
_DROPPED = "".join(
    f"DROP {kind} IF EXISTS {table}{suffix}\n\n"
    for table in ("titles", "texts")
    for kind, suffix in (
        ("TRIGGER", "_insert"),
        ("TRIGGER", "_delete"),
        ("TRIGGER", "_update"),
        ("TABLE", ""),
    )
)
# What is searched. ``split`` is ``search.split``.
_INDEX = f"""
{_DROPPED}

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
"""

# Also for version 2, whose ``split`` left Hangul whole.
_FILL = """
INSERT INTO titles (titles) VALUES ('rebuild')

INSERT INTO texts (texts) VALUES ('rebuild')
"""

SCHEMA = (_FIRST, _INDEX, _FILL)
