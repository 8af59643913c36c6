"""A conversation as text and back, for the browser to keep with its tab.

Whatever comes back was in the hands of a browser, maybe since an older version: what cannot be read
is no conversation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from app.page.conversation import Conversation, PlainRun, Reply, Turn, stats_line
from app.page.files import read_files
from app.worker.messages import Done, LoadedModel, ModelSpec

log = logging.getLogger(__name__)

LEFT = "this reply was not finished: the page was left, or the server ended"


def to_text(conversation: Conversation) -> str:
    """The turns as JSON; nothing where there are none."""
    if not conversation.turns:
        return ""
    return json.dumps(conversation.turns, default=_fields, ensure_ascii=False)


def tail_to_text(conversation: Conversation, start: int) -> str:
    """The last turn's reply as JSON with only its tokens from ``start`` on: in a tab (tab.js) it
    completes what ``to_text`` gave before. Costs what these tokens cost, however long the chat is.
    """
    turns = conversation.turns
    if not turns or turns[-1].reply is None:
        return ""
    reply = turns[-1].reply
    tail = {
        "turn": len(turns) - 1,
        "start": start,
        "reply": {**_fields(reply), "pieces": reply.pieces[start:]},
    }
    return json.dumps(tail, default=_fields, ensure_ascii=False)


def _fields(data: Any) -> dict[str, Any]:
    """Of a dataclass; ``asdict`` would copy every piece of every reply, which takes a while."""
    return {field.name: getattr(data, field.name) for field in fields(data)}


def from_text(text: str | None) -> Conversation:
    """What ``to_text`` was given; a turn that had no finished reply says so."""
    conversation = Conversation()
    try:
        turns = [_turn(turn) for turn in json.loads(text or "[]")]
        for turn in turns:
            stats_line(turn.reply or Reply(""))  # which its numbers must be good for
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("what the browser kept cannot be read and is left: %s", error)
    else:
        conversation.turns += turns
    return conversation


def _turn(data: Mapping[str, Any]) -> Turn:
    kept = data["reply"] or data.get("before")
    reply = _reply(kept) if kept else Reply("")
    if reply.done is None and not reply.error:
        reply.notice, reply.error = "", LEFT
    files = read_files(data.get("files", ()))
    return Turn(str(data["user"]), reply, n_ctx=int(data.get("n_ctx", 0)), files=files)


def _reply(data: Mapping[str, Any]) -> Reply:
    pieces = [(str(text), bool(drafted)) for text, drafted in data["pieces"]]
    done = _done(data["done"]) if data["done"] else None
    plain = PlainRun(**data["plain"]) if data["plain"] else None
    opening = str(data.get("opening", ""))
    told = data.get("thinking")
    thinking = None if told is None else bool(told)
    return Reply(
        str(data["method"]),
        pieces,
        "",
        done,
        str(data["error"]),
        plain,
        opening,
        thinking,
        int(data.get("n_left_out", 0)),
    )


def _done(data: Mapping[str, Any]) -> Done:
    model = data["model"]
    if model is not None:
        spec = ModelSpec(**{**model["spec"], "heads": tuple(model["spec"]["heads"])})
        model = LoadedModel(**{**model, "spec": spec})
    return Done(**{**data, "model": model})
