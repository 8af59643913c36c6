"""Reads exports of chats: ours, ChatGPT's and Open WebUI's.

Whatever a file contains, a chat that cannot be read is refused alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import TypeAdapter

from app.store.exports import FORMAT, VERSION
from app.store.records import Chat, Role, Seconds, Turn, UnreadableExport
from app.store.rows import TITLE_LENGTH

MOST_VALUES = 5_000_000  # of a file, counted by commas and brackets

Json = Mapping[str, Any]
_CHAT, _TURN, _SECONDS = TypeAdapter(Chat), TypeAdapter(Turn), TypeAdapter(Seconds)
_NEW = {"chat": "", "owner": "", "deleted_at": None}  # whatever the file says
_ID = re.compile(r"[\w-]{12}", re.ASCII)
_CITATION = re.compile("\ue200.*?\ue201")  # ChatGPT's marks of what it found on the web
# Open WebUI's form of a reply's reasoning.
_REASONING = re.compile(
    r"\s*<details type=\"reasoning\"[^>]*>\s*(?:<summary>.*?</summary>)?(.*?)</details>\s*", re.S
)
_QUOTE = re.compile(r"^(?:&gt;|>) ?", re.M)


@dataclass(frozen=True)
class Found:
    """A chat in a file. Its turns are numbered from 0, parents before their children, and
    ``chat.leaf`` and ``steps`` use these numbers.

    source  the file's format, and the chat's id there
    """

    source: str
    chat: Chat
    turns: Sequence[Turn]
    steps: Mapping[int, bytes] = field(default_factory=dict)


def origin(source: str, turns: Sequence[Turn]) -> str:
    """The same for the same chat of the same source with the same turns."""
    numbers: dict[int | None, int] = {turn.id: n for n, turn in enumerate(turns)}
    texts = [(numbers.get(turn.parent), turn.role, turn.text) for turn in turns]
    return hashlib.sha256(json.dumps([source, texts]).encode()).hexdigest()


def read(
    text: str | bytes, now: float, checked: Callable[[Found], Found] = lambda found: found
) -> tuple[list[Found], list[str]]:
    """The chats of a file and why others are refused.

    now      the time of chats that have none
    checked  what is kept of a chat; it raises ValueError for a damaged one
    Raises UnreadableExport if the file is none of the formats.
    """
    data = _loaded(text)
    if isinstance(data, dict) and data.get("format") == FORMAT:
        if data.get("version") != VERSION:
            raise UnreadableExport("another version of this program wrote it")
        chats, reader = data.get("chats"), _ours
    else:
        chats, reader = (data if isinstance(data, list) else [data]), _others
    if not (isinstance(chats, list) and chats):
        raise UnreadableExport("it has no chats")
    found, refused = [], []
    for n, chat in enumerate(chats, 1):
        title = str(chat.get("title") or "untitled") if isinstance(chat, dict) else "untitled"
        title = title[:TITLE_LENGTH]
        try:
            found.append(checked(reader(chat, now)))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            why = str(error) if isinstance(error, _Refused) else "it is damaged"
            refused.append(f"Chat {n} ({title}): {why}.")
    if refused and not found and reader is _others:
        raise UnreadableExport("it has no chats of this program, ChatGPT or Open WebUI")
    return found, refused


class _Refused(ValueError):
    pass


def _loaded(data: str | bytes) -> object:
    """The file's JSON."""
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise UnreadableExport(
            f"it has more than {MOST_VALUES:,} commas and brackets. Import it in parts"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableExport(
            "it is no export of chats, which would be JSON, or a part of it is missing"
        ) from None


# Ours


def _ours(data: Json, now: float) -> Found:
    turns, steps = [], {}
    for n, one in enumerate(data["turns"]):
        state = "interrupted" if one["state"] == "running" else one["state"]
        parent = _before(one["parent"], n)
        turn = _turn(**{**one, **_NEW, "id": n, "parent": parent, "state": state})
        turns.append(turn)
        if one.get("steps"):
            steps[n] = b64decode(one["steps"], validate=True)
    id_ = data["id"] if _ID.fullmatch(data["id"]) else ""
    leaf = _before(data["leaf"], len(turns))
    chat = _CHAT.validate_python({**data, **_NEW, "id": id_, "leaf": leaf})
    return Found(f"{FORMAT}:{data['id']}", chat, turns, steps)


# From other programs

# By id: the parent's id, and the turn; None if the message is not shown.
_Nodes = Mapping[str, tuple[str | None, Turn | None]]


def _others(data: Json, now: float) -> Found:
    if "mapping" in data:
        return _chatgpt(data, now)
    if "chat" in data:
        return _open_webui(data, now)
    raise _Refused("its format is unknown")


def _chatgpt(data: Json, now: float) -> Found:
    at = _time(data.get("create_time"), now)
    nodes = {
        name: (node.get("parent"), _chatgpt_turn(node.get("message") or {}, at))
        for name, node in data["mapping"].items()
    }
    turns, leaf = _tree(nodes, data.get("current_node"))
    chat = _chat(data.get("title"), at, _time(data.get("update_time"), at), turns, leaf)
    return Found(f"chatgpt:{data.get('conversation_id') or data.get('id')}", chat, turns)


def _chatgpt_turn(message: Json, at: float) -> Turn | None:
    """The message, unless it is hidden, a tool's, to a tool, or reasoning."""
    about, content = message.get("metadata") or {}, message.get("content") or {}
    role = (message.get("author") or {}).get("role")
    is_hidden = about.get("is_visually_hidden_from_conversation")
    if is_hidden or role not in get_args(Role) or message.get("recipient") not in (None, "all"):
        return None
    if content.get("content_type") not in ("text", "multimodal_text"):
        return None
    parts = [_part(part) for part in content.get("parts") or ()]
    text = _CITATION.sub("", "\n\n".join(filter(None, parts)))
    at = _time(message.get("create_time"), at)
    return _turn_of_others(role, text, at, about.get("model_slug"))


def _part(part: object) -> str:
    """A part of a message as text; pictures are named."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return "(A picture or file was here.)"


def _open_webui(data: Json, now: float) -> Found:
    chat = data["chat"]
    history = chat.get("history") or {}
    messages = history.get("messages")
    if not messages:  # its first versions had only a list
        names = [str(n) for n in range(len(chat["messages"]))]
        parents = [None, *names]
        messages = {
            name: {**message, "parentId": parent}
            for name, message, parent in zip(names, chat["messages"], parents, strict=False)
        }
    at = _time(data.get("created_at"), now)
    nodes = {
        name: (message.get("parentId"), _open_webui_turn(message, at))
        for name, message in messages.items()
    }
    turns, leaf = _tree(nodes, history.get("currentId"))
    title = data.get("title") or chat.get("title")
    found = _chat(title, at, _time(data.get("updated_at"), at), turns, leaf)
    system = chat.get("system") or (chat.get("params") or {}).get("system")
    found = replace(
        found, is_pinned=data.get("pinned") is True, settings={"system": system} if system else {}
    )
    return Found(f"open-webui:{data.get('id') or chat.get('id')}", found, turns)


def _open_webui_turn(message: Json, at: float) -> Turn | None:
    role, content = message.get("role"), message.get("content") or ""
    if role not in get_args(Role):
        return None
    if not isinstance(content, str):
        content = "\n\n".join(_part(part) for part in content)
    reasoning = _REASONING.match(content)
    if role == "assistant" and reasoning is not None:
        thoughts = _QUOTE.sub("", reasoning[1].strip())
        content = f"<think>\n{thoughts}\n</think>\n\n{content[reasoning.end() :]}"
    at = _time(message.get("timestamp"), at)
    return _turn_of_others(role, content, at, message.get("model"))


def _turn_of_others(role: object, text: str, at: float, model: object) -> Turn | None:
    """A turn of another program's chat; None if it has no text."""
    if not text:
        return None
    reply = {"model": str(model)} if model and role == "assistant" else {}
    return _turn(role=role, text=text, reply=reply, created_at=at)


def _tree(nodes: _Nodes, current: object) -> tuple[list[Turn], int]:
    """The turns of nodes, a branch after the other, and the number of the ``current`` one.

    What follows a node that is not shown follows its parent. A reply that only another reply
    follows, with a tool's work between, is one with it.
    """
    children: dict[str | None, list[str]] = {}
    for name, (parent, _) in nodes.items():
        children.setdefault(parent if parent in nodes else None, []).append(name)
    turns: list[Turn] = []
    numbers: dict[str, int | None] = {}
    # With each node, the number of the turn before it, and whether nothing else follows that.
    waiting: list[tuple[str, int | None, bool]] = [
        (name, None, False) for name in children.get(None, ())
    ]
    waiting.reverse()
    while waiting:
        name, number, is_alone = waiting.pop()
        turn = nodes[name][1]
        below = children.get(name, [])
        if turn is None:
            is_alone = is_alone and len(below) == 1
        else:
            before = turns[number] if number is not None else None
            if before is not None and is_alone and before.role == turn.role == "assistant":
                turns[before.id] = replace(before, text=f"{before.text}\n\n{turn.text}")
            else:
                turns.append(replace(turn, id=len(turns), parent=number))
                number = turns[-1].id
            is_alone = len(below) == 1
        numbers[name] = number
        waiting += [(child, number, is_alone) for child in reversed(below)]
    leaf = numbers.get(current) if isinstance(current, str) else None
    return turns, len(turns) - 1 if leaf is None else leaf


# What all readers need


def _chat(
    title: object, created_at: float, changed_at: float, turns: Sequence[Turn], leaf: int
) -> Chat:
    if not turns:
        raise _Refused("it has no messages")
    title = str(title or "")
    return Chat("", "", title, bool(title), created_at, changed_at, False, {}, leaf)


def _turn(**fields: object) -> Turn:
    turn = _TURN.validate_python({"id": 0, "chat": "", "parent": None, **fields})
    if not all(isinstance(file[name], str) for file in turn.files for name in ("name", "text")):
        raise TypeError(turn.files)
    return turn


def _before(number: object, n: int) -> int | None:
    """A turn's number, if it is one of the first ``n``."""
    if number is not None and not (isinstance(number, int) and 0 <= number < n):
        raise ValueError(number)
    return number


def _time(seconds: object, otherwise: float) -> float:
    return _SECONDS.validate_python(seconds) if seconds else otherwise
