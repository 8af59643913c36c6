"""What the store keeps, and its errors. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat

Role = Literal["user", "assistant"]
State = Literal["done", "running", "interrupted"]
Seconds = FiniteFloat


class StoreError(Exception):
    """Chats cannot be read or saved. The message is for the user."""


class InUse(StoreError):
    """Another server has the file. ``address`` is its page's."""

    def __init__(self, path: Path, address: str) -> None:
        super().__init__(f"The chats in {path} are open at {address}.")
        self.address = address


class NoSuchChat(StoreError):
    """The chat, turn or preset does not exist, was deleted, or belongs to someone else."""

    def __init__(self, what: str = "chat") -> None:
        super().__init__(f"This {what} does not exist, or it was deleted.")


class UnreadableExport(StoreError):
    """A file that is no export of chats; the message says why."""


@dataclass(frozen=True)
class Chat:
    """A chat, without its turns.

    is_named    the user gave it its title; otherwise it is the first message's first line, or what
                the model wrote
    changed_at  when a turn was last added
    leaf        the last turn of the branch that is shown; None if there are no turns
    """

    id: str
    owner: str
    title: str
    is_named: bool
    created_at: Seconds
    changed_at: Seconds
    is_pinned: bool
    settings: Mapping[str, Any]
    leaf: int | None
    deleted_at: float | None = None


@dataclass(frozen=True)
class Turn:
    """A message of the user or a reply. Turns with the same parent are siblings.

    files  of a message: each has a name and a text
    reply  of a reply: what the page keeps beside its text
    state  "interrupted": the server ended before the reply did
    """

    id: int
    chat: str
    parent: int | None
    role: Role
    text: str
    files: tuple[Mapping[str, Any], ...] = ()
    reply: Mapping[str, Any] = field(default_factory=dict)
    state: State = "done"
    created_at: Seconds = 0.0
    deleted_at: float | None = None


@dataclass(frozen=True)
class Hit:
    """A place that was found: a title, or a turn's text.

    turn     None if the title has the words
    snippet  the text around them, with \\x02 before and \\x03 after each word that was found
    """

    chat: Chat
    turn: int | None
    snippet: str


@dataclass(frozen=True)
class Preset:
    """Settings that the user named."""

    id: int
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Imported:
    """What an import did.

    chats    those added
    n_known  how many were there already
    refused  each chat that could not be read, and why
    """

    chats: tuple[Chat, ...]
    n_known: int
    refused: tuple[str, ...]
