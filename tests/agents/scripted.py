"""A stand-in for a model that calls tools without a mistake, whichever agent asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from app.worker.events import Events
from app.worker.messages import Answer, ChatRequest, Question, Tokens
from tests.support.fake_backend import FakeBackend, played
from tests.support.fake_endpoint import done

CREATE, CONTENT = "Create the file note.txt with the content: harvest 4711", "harvest 4711"
READ, SECRET = "Read the file secret.txt and tell me what it says.", "the access code is 8365"


class Careful(FakeBackend):
    """Runs a command in the shell that an agent offers. Without tools, it writes files as aider
    reads them."""

    def reply(self, request: ChatRequest) -> Events:
        text = _reply(request)
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        return played([*(Tokens(((piece, False),), (1,)) for piece in pieces), done()])

    def ask(self, question: Question) -> Events:
        return played([Answer("", 1)])


def _reply(request: ChatRequest) -> str:
    seen = json.dumps([message.get("content") for message in request.messages])
    if SECRET in seen:
        return f"It says: {SECRET}"
    functions = [tool["function"] for tool in request.tools]
    calls = [call for call in map(_shell_call, functions) if call]
    if not calls or request.messages[-1]["role"] == "tool":
        return f"note.txt\n```\n{CONTENT}\n```"
    command = "cat secret.txt" if READ in seen else f"echo {CONTENT} > note.txt"
    return calls[0].replace("COMMAND", command)


def _shell_call(function: Mapping[str, Any]) -> str:
    """A call with COMMAND for the command; empty if the function runs none."""
    schema = function.get("parameters", {})
    arguments: dict[str, Any] = dict.fromkeys(schema.get("required", ()), "note")
    for key in ("cmd", "command", "commands"):
        if key in schema.get("properties", ()):
            arguments[key] = ["COMMAND"] if key == "commands" else "COMMAND"
            call = json.dumps({"name": function["name"], "arguments": arguments})
            return f"<tool_call>\n{call}\n</tool_call>"
    return ""
