"""The page's routes over HTTP in the tests' own process, and what the stream tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from app import hosts, server
from app.api import chat
from app.api.errors import handle_errors
from app.api.log import RequestLog
from app.api.service import Service
from app.mcp.routes import add_route
from app.mcp.servers import Servers
from app.page import models
from app.page.chats import Chats
from app.page.owners import Owners
from app.page.routes import add_routes
from app.store import Store
from app.worker.backend import Backend
from app.worker.events import Events
from app.worker.messages import ChatRequest, Event, ModelSpec, Status, Tokens
from tests.support.fake_backend import DONE, FakeBackend
from tests.support.waiting import wait_until

Json = dict[str, Any]


@contextmanager
def served(
    backend: Backend,
    file: Path,
    *,
    host: str = "127.0.0.1",
    keys: tuple[str, ...] = (),
    is_one: bool = True,
) -> Iterator[Site]:
    """Serve the page's routes."""
    servers = Servers(file.with_name("mcp.json"))
    chats = Chats(backend, Store(file), servers)
    app = FastAPI()
    handle_errors(app)
    add_routes(app, chats, Owners(is_one=is_one))
    add_route(app, servers, is_one=is_one)
    models.add_routes(app, chats, ModelSpec("m.gguf"))
    listening = hosts.bind("127.0.0.1", None)
    app.include_router(chat.router)
    app.state.service = Service(backend)
    server.serve(RequestLog(server.guard(app, host, (), keys, page=True)), listening)
    site = Site(hosts.address("127.0.0.1", listening) + "page/", chats, backend)
    try:
        yield site
    finally:
        for page in site.pages:
            page.client.close()
        chats.close()


@dataclass
class Site:
    """The address of the page's routes, and the clients that were made."""

    address: str
    chats: Chats
    backend: Any
    pages: list[Page] = field(default_factory=list)

    def page(self, **headers: str) -> Page:
        self.pages.append(Page(self.address, self.backend, **headers))
        return self.pages[-1]


class Page:
    """A client, with the events of its stream, and the backend, whose replies a test writes."""

    def __init__(self, address: str, backend: Any, **headers: str) -> None:
        self.backend = backend
        self.client = httpx.Client(base_url=address, headers=headers, timeout=120)

    def ask(self, method: str, path: str, status: int = 200, **body: Any) -> Any:
        answer = self.client.request(method, path, json=body if body else None)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str, status: int = 200) -> Any:
        return self.ask("GET", path, status)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = self.client.post(path, content=json.dumps(body))
        assert answer.status_code == status, answer.text
        return answer.json()

    def new_chat(self, **body: Any) -> str:
        return str(self.post("chats", **body)["id"])

    def turns(self, chat: str) -> list[Json]:
        return list(self.get(f"chats/{chat}")["turns"])

    def events(self, after: int, *, until: str) -> list[tuple[str, Json]]:
        """The events after one of them, to those of a new chat with this title."""
        last = self.ask("PATCH", f"chats/{self.new_chat()}", title=until)["id"]
        seen: list[tuple[str, Json]] = []
        for _, kind, data in self.stream(after):
            if kind == "chat" and data["id"] == last:
                if data["title"]:
                    return seen
            else:
                seen.append((kind, data))
        raise AssertionError("the stream ended")

    def stream(self, after: int | None, *, last_id: str = "") -> Iterator[tuple[int, str, Json]]:
        """The stream's events, as (id, kind, data)."""
        headers = {"Last-Event-ID": last_id} if last_id else {}
        query = {} if after is None else {"after": str(after)}
        with self.client.stream("GET", "events", params=query, headers=headers) as answer:
            assert answer.status_code == 200
            found: dict[str, str] = {}
            for line in answer.iter_lines():
                if line.startswith(":"):
                    continue
                if line:
                    name, _, value = line.partition(": ")
                    found[name] = value
                elif found:
                    yield int(found["id"]), found["event"], json.loads(found["data"])
                    found = {}

    def until_done(self, turn: int, after: int) -> list[tuple[str, Json]]:
        """The events after one of them, to the end of a reply."""
        seen = []
        for _, kind, data in self.stream(after):
            seen.append((kind, data))
            told = data.get("set", {}) if kind == "turn" and data["turn"] == turn else {}
            if told.get("state") == "done":
                return seen
        raise AssertionError("the stream ended")

    def until(self, chat: str, holds: Callable[[Json], object]) -> Json:
        """The chat's last turn, as soon as something holds of it."""
        wait_until(lambda: holds(self.turns(chat)[-1]))
        return self.turns(chat)[-1]

    def send(self, chat: str, text: str, **body: Any) -> list[Json]:
        """Send a message; returns it and its reply, which has begun."""
        return list(self.post(f"chats/{chat}/messages", text=text, **body)["turns"])

    def done(self, chat: str) -> Json:
        """The chat's last turn, once it has ended."""
        return self.until(chat, lambda turn: turn["state"] == "done")

    def reply(self, chat: str, *events: Event | str) -> Json:
        """Write the last reply to its end; returns it."""
        self.backend.write(*events, DONE)
        return self.done(chat)

    def talk(self, *texts: str) -> tuple[str, list[int]]:
        """A chat with messages and the replies to them; returns it and its turns."""
        chat = self.new_chat()
        for text in texts:
            self.send(chat, text)
            self.reply(chat, f"re: {text}")
        return chat, [turn["id"] for turn in self.turns(chat)]

    def say(self, chat: str, text: str, **body: Any) -> tuple[int, int]:
        """Send a message and wait for the end of its reply; returns both turns."""
        seq = self.get("state")["seq"]
        asked, reply = self.send(chat, text, **body)
        self.until_done(reply["id"], seq)
        return asked["id"], reply["id"]


class Written(FakeBackend):
    """Its replies come as the test writes them, and end when they are stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[Events] = []
        self.state = super().status()

    def status(self) -> Status:
        return self.state

    def reply(self, request: ChatRequest) -> Events:
        self.requests.append(request)
        events = Events(lambda: events.put(replace(DONE, finish_reason="cancelled")))
        self.replies.append(events)
        return events

    def write(self, *events: Event | str) -> None:
        """Add events to the last reply; a text is a token that was not drafted."""
        for event in events:
            self.replies[-1].put(Tokens(((event, False),)) if isinstance(event, str) else event)


def said(backend: Written) -> list[str]:
    """What the last request says, without roles."""
    return [message["content"] for message in backend.requests[-1].messages]
