"""Conversations as JSON, which the browser saves, and back.

Data from the browser may be damaged or from an older version. What cannot be read counts as an
empty conversation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from app.page.conversation import Conversation, PlainRun, Reply, Turn, stats_line
from app.page.files import read_files
from app.worker.messages import Done, LoadedModel, ModelSpec

log = logging.getLogger(__name__)

UNFINISHED = "This reply is unfinished: the page was closed or the server stopped."


def to_text(conversation: Conversation) -> str:
    """The turns as JSON; empty if there are none.

    ``vars`` makes dicts of dataclasses; ``asdict`` would copy every token of every reply.
    """
    if not conversation.turns:
        return ""
    return json.dumps(conversation.turns, default=vars, ensure_ascii=False)


def tail_to_text(conversation: Conversation, start: int) -> str:
    """The last reply as JSON with only its tokens from ``start`` on; empty if there is no reply.

    tab.js merges it into an earlier result of ``to_text``. The cost grows with the new tokens only.
    """
    turns = conversation.turns
    if not turns or turns[-1].reply is None:
        return ""
    reply = turns[-1].reply
    shown = {**vars(reply), "pieces": reply.pieces[start:]}
    tail = {"turn": len(turns) - 1, "start": start, "reply": shown}
    return json.dumps(tail, default=vars, ensure_ascii=False)


def from_text(text: str | None) -> Conversation:
    """The conversation that ``to_text`` was given. Unfinished replies get an error that says so."""
    conversation = Conversation()
    try:
        turns = [_turn(turn) for turn in json.loads(text or "[]")]
        for turn in turns:
            stats_line(turn.reply or Reply(""))  # raises if its numbers are invalid
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("ignoring an unreadable conversation from the browser: %s", error)
    else:
        conversation.turns += turns
    return conversation


def _turn(data: Mapping[str, Any]) -> Turn:
    saved = data["reply"] or data.get("before")
    reply = _reply(saved) if saved else Reply("")
    if reply.done is None and not reply.error:
        reply.notice, reply.error = "", UNFINISHED
    files = read_files(data.get("files", ()))
    return Turn(str(data["user"]), reply, n_ctx=int(data.get("n_ctx", 0)), files=files)


def _reply(data: Mapping[str, Any]) -> Reply:
    pieces = [(str(text), bool(drafted)) for text, drafted in data["pieces"]]
    done = _done(data["done"]) if data["done"] else None
    plain = PlainRun(**data["plain"]) if data["plain"] else None
    opening = str(data.get("opening", ""))
    thinking = data.get("thinking")
    thinking = None if thinking is None else bool(thinking)
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
    return Done(**{**data, "model": model, "decode_ms": tuple(data.get("decode_ms", ()))})
