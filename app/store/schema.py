"""The database's tables. The statements, separated by blank lines, bring a file of any earlier
version to this one: its tables stay.
"""

VERSION = 6

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

CREATE TABLE IF NOT EXISTS answers (
    chat TEXT PRIMARY KEY REFERENCES chats (id) ON DELETE CASCADE,
    by_tool TEXT NOT NULL
)

CREATE TABLE IF NOT EXISTS folded (
    turn INTEGER PRIMARY KEY REFERENCES turns (id) ON DELETE CASCADE,
    text TEXT NOT NULL
)

CREATE TABLE IF NOT EXISTS presets (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    UNIQUE (owner, name)
)
"""

# Earlier versions searched an index.
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
# What is searched. ``folded`` is ``search.folded``.
FOLDED = "INSERT OR REPLACE INTO folded SELECT id, folded(text) FROM turns"
SCHEMA = "\n\n".join(part.strip() for part in (_TABLES, _DROPPED, _MENDED, FOLDED))
