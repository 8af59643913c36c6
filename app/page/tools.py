"""Tools in chats: which calls are made, and what comes of them.

The servers are the user's (``app.mcp``). A call is made once the user has allowed it, for the chat
that it is in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from app.mcp.servers import Servers, Tool
from app.page.reply import Reply, ToolCall

MOST_ROUNDS = 10  # of calls after a message; then the model has to answer
LEAST_RESULT = 500  # characters
Chosen = Mapping[str, Sequence[str]]  # as ``Settings.tools``
Answer = Literal["once", "always", "never"]


class Tools:
    """The servers' tools, and what the user has answered for all calls of a tool in a chat. Answers
    end with the server."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._answers: dict[tuple[str, str, str], bool] = {}  # by chat, server and tool

    async def chosen(self, chosen: Chosen) -> list[Tool]:
        """The tools that a chat has chosen. Raises ConfigError and ToolError."""
        found = await self.servers.tools(list(chosen))
        return [tool for tool in found if tool.own not in chosen[tool.server]]

    def take(self, chat: str, call: ToolCall, answer: Answer) -> None:
        """Take the user's answer to a call."""
        call.state = "denied" if answer == "never" else "asked"
        if answer != "once":
            self._answers[chat, call.server, call.tool] = answer == "always"

    def ask_again(self, chat: str) -> None:
        """Forget what was answered for all calls in a chat."""
        self._answers = {key: value for key, value in self._answers.items() if key[0] != chat}

    def decide(self, chat: str, call: ToolCall) -> bool:
        """Whether a call is made now, without another answer. One that never is, is denied."""
        known = self._answers.get((chat, call.server, call.tool))
        if call.state == "asked" and known is False:
            call.state = "denied"
        return call.state == "asked" and known is True

    @staticmethod
    def are_done(rounds: Sequence[Sequence[ToolCall]]) -> bool:
        """Whether the model has to answer after these rounds of calls, the last one first: it
        repeats itself, as small models do while they see tools, or there were too many."""
        is_again = bool(rounds) and all(call.state == "repeated" for call in rounds[0])
        return is_again or len(rounds) >= MOST_ROUNDS

    async def call(self, call: ToolCall, reply: Reply) -> None:
        """Make a call. Its result has at most half of what the reply leaves of the context."""
        # A token has about three characters.
        room = 3 * (reply.n_ctx - reply.n_context) // 2 // len(reply.calls)
        tool = Tool(call.server, call.name, call.tool, "", {})
        arguments = json.loads(call.arguments)
        result = await self.servers.call(tool, arguments, max(LEAST_RESULT, room))
        call.result, call.state, call.is_error = result.text, "done", result.is_error
