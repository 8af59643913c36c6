"""Replies without an engine: what cancels them, and what the server publishes and decides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.__main__ import common_memory, parse_flags
from app.api.replies import Replies
from app.api.service import Service
from app.server import endpoint, guard
from app.worker.events import Events
from app.worker.messages import ChatRequest, Report, Tokens
from tests.support.fake_backend import DONE, FakeBackend, played


class Endless:
    """A backend whose reply goes on until it is closed."""

    def __init__(self) -> None:
        self.n_closed = 0
        self.events = Events(self._close)

    def _close(self) -> None:
        self.n_closed += 1

    def reply(self, request: ChatRequest) -> Events:
        return self.events


def test_a_cancelled_run_stops_its_requests_even_while_text_arrives() -> None:
    async def cancelled_after(n_turns: int) -> bool:
        backend: Any = Endless()
        work = asyncio.ensure_future(Replies(backend, [ChatRequest("one")], 100).finish())
        await asyncio.sleep(0.01)
        backend.events.put(Tokens((("a", False),)))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        work.cancel()
        done, _ = await asyncio.wait([work], timeout=0.2)
        return bool(done) and backend.n_closed > 0

    async def all_cancelled() -> list[bool]:
        return [await cancelled_after(n_turns) for n_turns in range(6)]

    assert asyncio.run(all_cancelled()) == [True] * 6


class Recording(FakeBackend):
    """A backend for an endpoint: keeps requests, and answers with one event."""

    def reply(self, request: ChatRequest) -> Events:
        self.requests.append(request)
        return played([DONE])

    def report(self) -> Report:
        return Report(running=("one",), n_waiting=2, n_tokens=84)


def test_what_the_engine_publishes_is_told_without_asking_it() -> None:
    with client(Recording()) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/props").json()["model_path"] == ""
        assert http.get("/slots").json()[0]["id_task"] == "one"
        lines = http.get("/metrics").text.splitlines()
    assert "llamacpp:tokens_predicted_total 84.0" in lines
    assert "vllm:num_requests_waiting 2.0" in lines


def test_clients_with_different_keys_have_different_memories() -> None:
    backend, keys = Recording(), ("first", "second", "first")
    with client(backend, keys[:2]) as http:
        for key in keys:
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
                ("/completion", {"prompt": "hi"}),
            ):
                assert http.post(path, json=body, headers={"X-Api-Key": key}).status_code == 200
    memories = [request.memory for request in backend.requests]
    assert memories[:3] == [memories[0]] * 3 == memories[6:]
    assert memories[3:6] == [memories[3]] * 3
    assert len({memories[0], memories[3], ""}) == 3
    for only in ((), ("first",)):
        backend = Recording()
        with client(backend, only) as http:
            http.post("/completion", json={"prompt": "hi"}, headers={"X-Api-Key": "first"})
        assert backend.requests[0].memory == ""


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ([], ""),
        (["--host", "::1"], ""),
        (["--host", "0.0.0.0"], None),
        (["--api-key", "x"], ""),
        (["--api-key", "x", "--host", "0.0.0.0"], ""),
        (["--api-key", "x", "--api-key", "y"], None),
    ],
)
def test_all_clients_share_a_memory_only_on_this_machine_or_if_they_share_a_key(
    flags: list[str], memory: str | None
) -> None:
    assert common_memory(parse_flags(flags)) == memory


def client(backend: Any, keys: Sequence[str] = ()) -> TestClient:
    app = guard(endpoint(Service(backend)), "127.0.0.1", keys=keys)
    key = {"X-Api-Key": keys[0]} if keys else {}
    return TestClient(app, base_url="http://127.0.0.1", headers=key)
