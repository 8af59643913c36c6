"""The page with a model that calls a tool for each message, and then repeats the result:
``python -m tests.support.tools_page FOLDER``, in which chats and ``mcp.json`` are."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import app.site
from app.hosts import address, bind
from app.start import parse_flags
from app.store import Store
from app.worker.events import Events
from app.worker.messages import ChatRequest, Opening, Tokens
from tests.support.fake_backend import DONE, FakeBackend, played


class Caller(FakeBackend):
    def reply(self, request: ChatRequest) -> Events:
        last = request.messages[-1]
        text = f"It says {last['content']}"
        if last["role"] == "user" and request.tools:
            text = (
                'I ask.\n<tool_call>\n{"name": "test__echo", "arguments": '
                '{"text": "<img src=x onerror=alert(1)>"}}\n</tool_call>'
            )
        return played([Opening(""), Tokens(((text, False),)), DONE])


def main(folder: Path) -> None:
    listening, backend = bind("127.0.0.1", None), Caller()
    flags, file = parse_flags(["--no-browser"]), folder / "chats.db"
    app.site.default_file = lambda: file  # type: ignore[attr-defined]
    app.site.serve_site(listening, backend, flags, Store(file), method="auto", is_one=True)
    print(address("127.0.0.1", listening), flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
