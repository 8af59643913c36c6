"""Tools in chats: which calls are made, and what comes of them.

The servers are the user's (``app.mcp``). A call is made once the user has allowed it, for the chat
that it is in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from app.mcp.servers import Offer, Servers
from app.page.reply import Reply, ToolCall
from app.store import Store

MOST_ROUNDS = 10  # of calls after a message; then the model has to answer
LEAST_RESULT = 500  # characters
Chosen = Mapping[str, Sequence[str]]  # as ``Settings.tools``
Answer = Literal["once", "always", "never"]


async def chosen_tools(servers: Servers, chosen: Chosen) -> list[Offer]:
    """The tools that a chat has chosen. Raises ConfigError and ToolError."""
    found = await servers.tools(list(chosen))
    return [tool for tool in found if tool.own not in chosen[tool.server]]


def take(store: Store, chat: str, owner: str, call: ToolCall, answer: Answer) -> None:
    """Take the user's answer to a call. One for all calls of a tool is kept with the chat."""
    call.state = "denied" if answer == "never" else "asked"
    if answer != "once":
        known = store.answers(chat, owner)
        store.answers(chat, owner, {**known, f"{call.server}/{call.tool}": answer == "always"})


def decide(call: ToolCall, answers: Mapping[str, bool]) -> bool:
    """Whether a call is made now, without another answer. One that never is, is denied."""
    known = answers.get(f"{call.server}/{call.tool}")
    if call.state == "asked" and known is False:
        call.state = "denied"
    return call.state == "asked" and known is True


def are_done(rounds: Sequence[Sequence[ToolCall]]) -> bool:
    """Whether the model has to answer after these rounds of calls, the last one first: it repeats
    itself, as small models do while they see tools, or there were too many."""
    is_again = bool(rounds) and all(call.state == "repeated" for call in rounds[0])
    return is_again or len(rounds) >= MOST_ROUNDS


async def make(servers: Servers, call: ToolCall, reply: Reply) -> None:
    """Make a call. Its result has at most half of what the reply leaves of the context."""
    # A token has about three characters.
    room = 3 * (reply.n_ctx - reply.n_context) // 2 // len(reply.calls)
    given, most = json.loads(call.arguments), max(LEAST_RESULT, room)
    result = await servers.call(call.server, call.tool, given, most)
    call.result, call.state, call.is_error = result.text, "done", result.is_error
