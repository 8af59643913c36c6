"""Replies without an engine: what cancels them, and what the server publishes and decides."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.api import replies
from app.api.errors import ApiError
from app.api.facts import Gathered, Shown, legacy_logprobs
from app.api.replies import Replies
from app.api.service import Service
from app.hosts import address, bind
from app.server import endpoint, guard, serve
from app.start import common_memory, parse_flags
from app.worker.events import Events
from app.worker.messages import (
    Chance,
    ChatRequest,
    Event,
    Failed,
    Opening,
    Report,
    Tokens,
    Waiting,
)
from tests.support.fake_backend import DONE, FakeBackend, Recording, played


class Endless:
    """A backend whose reply goes on until it is closed."""

    def __init__(self) -> None:
        self.n_closed = 0
        self.events = Events(self._close)

    def _close(self) -> None:
        self.n_closed += 1

    def reply(self, request: ChatRequest) -> Events:
        return self.events


async def finished(replies: Replies) -> list[Gathered]:
    """What came of the replies."""
    try:
        async for _ in replies.events():
            pass
    finally:
        replies.close()
    return replies.choices


def test_a_cancelled_run_stops_its_requests_even_while_text_arrives() -> None:
    async def cancelled_after(n_turns: int) -> bool:
        backend: Any = Endless()
        work = asyncio.ensure_future(finished(Replies(backend, [ChatRequest("one")], 100)))
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


class Reporting(Recording):
    """A backend for an endpoint, which has done something."""

    def report(self) -> Report:
        return Report(
            running=("one",), n_waiting=2, n_tokens=84, n_later=80, decode_seconds=4.0, n_read=9
        )


def test_what_the_engine_publishes_is_told_without_asking_it() -> None:
    with client(Reporting()) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.head("/").status_code == 200  # as Claude Code asks at its start
        assert http.get("/props").json()["model_path"] == ""
        assert http.get("/slots").json()[0]["id_task"] == "one"
        assert http.get("/v1/models").json()["data"][0]["status"] == {"value": "loaded"}
        lines = http.get("/metrics").text.splitlines()
    assert {"llamacpp:prompt_tokens_total 9.0", "llamacpp:predicted_tokens_seconds 20.0"} <= {
        *lines
    }
    assert "llamacpp:tokens_predicted_total 84.0" in lines
    assert "llamacpp:requests_deferred 2.0" in lines


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


class Scripted(FakeBackend):
    """Replies with given events."""

    events: Events

    def reply(self, request: ChatRequest) -> Events:
        return self.events


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    """A server with quick pings, whose replies are scripted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replies, "PING_SECONDS", 0.01)
        patched.setattr(replies, "HEADERS_SECONDS", 0.1)
        listening = bind("127.0.0.1", 0)
        serve(guard(endpoint(Service(scripted)), "127.0.0.1"), listening)
        with httpx.Client(base_url=address("127.0.0.1", listening), timeout=60) as made:
            yield made


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True})
RESPONSE = ("/v1/responses", {"input": "a", "stream": True})
TEXT = ("/v1/completions", {"prompt": "a", "stream": True})
NATIVE = ("/completion", {"prompt": "a", "stream": True})


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT, NATIVE, RESPONSE])
@pytest.mark.parametrize("first", [Waiting(3), Waiting(1, loading=True), Opening("<think>"), None])
def test_a_stream_that_waits_has_its_headers_and_signs_of_life(
    http: httpx.Client, scripted: Scripted, path: str, body: dict[str, Any], first: Event | None
) -> None:
    scripted.events = events = Events(lambda: None)
    if first is not None:
        events.put(first)
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        ping = "event: ping" if path == "/v1/responses" else ": ping"
        assert [next(line for line in lines if line == ping) for _ in range(2)] == [ping] * 2
        events.put(Tokens((("hello", False),)))
        assert next(line for line in lines if line.startswith("data: ") and "hello" in line)
        events.put(Failed("it broke"))
        (*_, last) = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert last.get("response", last)["error"]["message"] == "it broke"


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT, NATIVE])
def test_what_is_wrong_before_a_stream_starts_has_a_status(
    http: httpx.Client, scripted: Scripted, path: str, body: dict[str, Any]
) -> None:
    for before in ([], [Opening("<think>")]):
        failed = Failed("no such thing", kind="invalid", param="top_p")
        scripted.events = played([*before, failed])
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_p")


def test_a_prompt_that_is_too_long_has_the_codes_that_clients_look_for() -> None:
    failed = Failed("it needs 600 tokens", kind="too long", requested=600, available=512)
    assert ApiError.of(failed).body == {
        "error": {
            "message": "The request exceeds the available context size: it needs 600 tokens",
            "type": "exceed_context_size_error",
            "param": None,
            "code": "context_length_exceeded",
            "n_prompt_tokens": 600,
            "n_ctx": 512,
        }
    }


def test_a_reply_that_has_had_its_time_ends_at_a_new_line() -> None:
    async def n_closed(seconds: float, *texts: str) -> int:
        backend: Any = Endless()
        made = Replies(backend, [ChatRequest("one", predict_seconds=seconds)], 100)
        for text in texts:
            backend.events.put(Tokens(((text, False),)))
        backend.events.put(DONE)
        await made.start()
        async for _ in made.events():
            await asyncio.sleep(0.002)
        return backend.n_closed

    assert asyncio.run(n_closed(1e-3, "a", "b\n", "c")) == 1
    assert asyncio.run(n_closed(1e-3, "a\n", "b", "c")) == 0  # no new line after the time
    assert asyncio.run(n_closed(100, "a", "b\n", "c")) == 0
    assert asyncio.run(n_closed(0, "a", "b\n", "c")) == 0


@pytest.mark.parametrize(
    ("parts", "n_indent", "text"),
    [
        (("x = 1\n", "    y\n", "  z\n", "    w"), 4, "x = 1\n    y\n"),
        (("x = 1\n    y\n  z\n    w",), 4, "x = 1\n    y"),
        (("x\n\ty", "\n\n\tz"), 1, "x\n\ty"),
        (("x\n  ", "  y\n    z"), 4, "x\n    y\n    z"),
        (("x\n  ", "y", "more"), 4, "x\n  "),
        (("  x\ny\nz",), 0, "  x\ny\nz"),
    ],
)
def test_a_line_with_too_little_indentation_ends_a_reply(
    parts: tuple[str, ...], n_indent: int, text: str
) -> None:
    async def written() -> tuple[str, int]:
        backend: Any = Endless()
        made = Replies(backend, [ChatRequest("one", n_indent=n_indent)], 100)
        for part in parts:
            backend.events.put(Tokens(((part, False),)))
        backend.events.put(DONE)
        await made.start()
        async for _ in made.events():
            pass
        return made.choices[0].text, backend.n_closed

    found, n_closed = asyncio.run(written())
    assert (found, n_closed > 0) == (text, text != "".join(parts))


def chance(token: int, piece: bytes, logprob: float = -1.0) -> Chance:
    return Chance(token, piece, logprob)


def tokens(*parts: tuple[str, Chance]) -> Tokens:
    return Tokens(
        tuple((text, False) for text, _ in parts),
        tuple(one.id for _, one in parts),
        tuple((one, ()) for _, one in parts),
    )


def shown(gathered: Gathered) -> list[bytes]:
    return [own.piece for _, (own, _) in gathered.shown]


def test_probabilities_are_those_of_the_tokens_that_are_shown() -> None:
    said = ("He", chance(1, b"He")), ("llo", chance(2, b"llo"))
    for end in ("", "</s>"):
        gathered = Gathered(ends={9})
        gathered.take(tokens(*said, (end, chance(9, b"</s>"))))
        gathered.take(DONE)
        assert shown(gathered) == [b"He", b"llo"]
    # A stop string took away two tokens, and a part of one.
    gathered = Gathered()
    gathered.take(tokens(*said, (" w", chance(3, b" wo")), ("", chance(4, b"r"))))
    gathered.take(tokens(("", chance(5, b"ld"))))
    gathered.take(dataclasses.replace(DONE, stop_string="orld"))
    assert shown(gathered) == [b"He", b"llo", b" wo"]
    # The first two bytes of a character have no text, and are shown.
    split = (("", chance(6, b"\xe2")), ("", chance(7, b"\x82")), ("€", chance(8, b"\xac")))
    gathered = Gathered()
    gathered.take(tokens(*split[:2]))
    assert shown(gathered) == []
    gathered.take(tokens(split[2], split[0]))
    gathered.take(DONE)
    assert shown(gathered) == [b"\xe2", b"\x82", b"\xac", b"\xe2"]


def test_older_logprobs_have_offsets_of_characters_and_each_text_once() -> None:
    top = (chance(1, b"a", -0.5), chance(2, b"a", -0.7), chance(3, b"\xe2", -3.0))
    found = legacy_logprobs(
        [
            Shown("", (chance(0, b"<s>", math.nan), ())),
            Shown("", (chance(3, b"\xe2\x82", -3.0), top)),
            Shown("€", (chance(4, b"\xac", -2.0), top[:2])),
            Shown("ab", (chance(5, b"ab", -0.1), top)),
            Shown("c", (chance(6, b"c", -0.2), ())),
        ],
        at=7,
    )
    assert found["tokens"] == ["<s>", "bytes:\\xe2\\x82", "bytes:\\xac", "ab", "c"]
    assert found["text_offset"] == [7, 7, 7, 8, 10]
    assert math.isnan(found["token_logprobs"][0])  # null in JSON
    assert found["token_logprobs"][1:] == [-3.0, -2.0, -0.1, -0.2]
    assert found["top_logprobs"] == [
        None,
        {"a": -0.5, "bytes:\\xe2\\x82": -3.0, "bytes:\\xe2": -3.0},
        {"a": -0.5, "bytes:\\xac": -2.0},
        {"ab": -0.1, "a": -0.5, "bytes:\\xe2": -3.0},
        {"c": -0.2},
    ]
