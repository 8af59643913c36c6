"""Chats in SQLite: kept as trees of turns, searched, exported and imported.

Knows nothing of HTTP, HTML, Gradio or the backend. What a reply and a chat's settings contain is
the page's business: the store keeps them as JSON.
"""

from app.store.imports import Found
from app.store.records import (
    Chat,
    Hit,
    Imported,
    InUse,
    NoSuchChat,
    Preset,
    StoreError,
    Turn,
    UnreadableExport,
)
from app.store.store import Store, default_file

__all__ = ["Chat", "Found", "Hit", "Imported", "InUse", "NoSuchChat", "Preset", "Store"]
__all__ += ["StoreError", "Turn", "UnreadableExport", "default_file"]
