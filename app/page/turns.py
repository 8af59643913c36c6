"""Turns as the page shows them: JSON with the HTML of their blocks.

Text of the user or the model never becomes HTML.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from app.page.markdown import Growing, render_blocks, render_message
from app.page.reply import Reply
from app.store import Turn
from speculation.system.files import in_words

INTERRUPTED = "The server ended while it wrote this reply. The text up to then is kept."
CALL_INTERRUPTED = (
    "The server ended during this call. It may have been made, in part or as a whole."
)
PARTS = ("reasoning", "answer")
# The fields of a reply that are shown as they are.
_SHOWN = (
    *("method", "model", "n_ctx", "n_context", "n_left_out", "reads_from"),
    *("sentence", "figures", "cells", "error"),
)

T = TypeVar("T")
_replies = ThreadPoolExecutor(1, "replies")  # one, as they take the interpreter from the rest


class Shown:
    """What is shown of a reply's text while it grows."""

    def __init__(self) -> None:
        self._parts = {part: Growing() for part in PARTS}

    def update(self, reply: Reply, *, is_over: bool = False) -> list[dict[str, Any]]:
        """The blocks that changed, as the stream sends them. May run in a thread while the reply
        grows; to send the same again changes nothing."""
        changed = []
        for part, start, end in _spans(reply):
            growing = self._parts[part]
            render = growing.finish if is_over else growing.update
            first = render(reply.text[start:end], reply.marks, start)
            if first is not None:
                blocks, same = growing.blocks[first:], growing.same
                blocks[:1] = [one[len(same) :] for one in blocks[:1]]
                change = {"part": part, "from": first, "same": in_javascript(same)}
                changed.append({**change, "blocks": blocks})
        return changed

    def blocks(self) -> dict[str, list[str]]:
        """All blocks, as fields of a turn."""
        reasoning, answer = (list(self._parts[part].blocks) for part in PARTS)
        return {"reasoning": reasoning, "blocks": answer}


async def while_shown(work: Callable[[], T]) -> T:
    """What ``work`` returns, which makes HTML or figures of a reply."""
    return await asyncio.get_running_loop().run_in_executor(_replies, work)


def in_javascript(text: str) -> int:
    """The length of a text as JavaScript counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _spans(reply: Reply) -> list[tuple[str, int, int]]:
    """Where the parts are in a reply's text."""
    start, end, answer = reply.reasoning or (0, 0, 0)
    return [("reasoning", start, end), ("answer", answer, max(answer, reply.end))]


def turn_json(
    turn: Turn, siblings: Sequence[int], live: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A turn. ``live`` has what is shown of a reply that is being generated."""
    found: dict[str, Any] = {
        "id": turn.id,
        "parent": turn.parent,
        "role": turn.role,
        "siblings": list(siblings),
        "state": turn.state,
    }
    if turn.role == "user":
        texts = [
            (file["name"], file["text"].encode("utf-8", "surrogatepass")) for file in turn.files
        ]
        files = [{"name": name, "size": in_words(len(text))} for name, text in texts]
        return {**found, "text": turn.text, "blocks": render_message(turn.text), "files": files}
    if live is not None:
        return {**found, **live}
    reply = Reply.from_json(turn.text, turn.reply)
    reasoning, answer = (
        render_blocks(reply.text[start:end], reply.marks, start) for _, start, end in _spans(reply)
    )
    return {**found, **reply_fields(reply, turn.state), "reasoning": reasoning, "blocks": answer}


def reply_fields(reply: Reply, state: str) -> dict[str, Any]:
    """What is shown of a reply beside its blocks."""
    is_running = state == "running"
    is_cut_short = (reply.is_cut_short or state == "interrupted") and not reply.calls
    interrupted = CALL_INTERRUPTED if reply.calls else INTERRUPTED
    return {
        **{name: getattr(reply, name) for name in _SHOWN},
        "state": state,
        "text": "" if is_running else reply.answer,
        "notice": interrupted if state == "interrupted" else reply.notice,
        "can_continue": not is_running and bool(reply.text) and is_cut_short,
        "seconds_thinking": round(reply.seconds_thinking, 1),
        "calls": [call.as_json(is_running=is_running) for call in reply.calls],
    }
