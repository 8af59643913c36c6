"""Replies without an engine: what cancels and limits them, what is counted, told and logged."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from app.api import log, replies
from app.api.facts import Gathered, Shown, legacy_logprobs
from app.api.replies import Replies
from app.api.service import Service
from app.server import endpoint, guard
from app.start import common_memory, parse_flags
from app.worker.events import Events
from app.worker.messages import (
    Chance,
    ChatRequest,
    Event,
    Failed,
    ModelFacts,
    Opening,
    Prefill,
    Question,
    Report,
    Status,
    Tokenize,
    Tokens,
    Waiting,
)
from tests.support.fake_backend import DONE, MODEL, FakeBackend, Recording
from tests.support.fake_endpoint import client, served
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"


class Held(FakeBackend):
    """A model whose replies and answers come as a test puts them into ``given``."""

    def __init__(self, *events: Event) -> None:
        super().__init__()
        self.given: list[Events] = []
        self.n_closed = 0
        self._events = events

    def reply(self, request: ChatRequest) -> Events:
        self.requests.append(request)
        return self.ask(Tokenize(""))

    def ask(self, question: Question) -> Events:
        self.given.append(Events(self._close))
        for event in self._events:
            self.given[-1].put(event)
        return self.given[-1]

    def status(self) -> Status:
        marks = {"prefix": 1, "suffix": 2, "middle": 3}
        return Status(MODEL, facts=ModelFacts(n_vocab=100, longest=9, fim=marks))

    def _close(self) -> None:
        self.n_closed += 1


async def finished(replies: Replies) -> list[Gathered]:
    """What came of the replies."""
    try:
        async for _ in replies.events():
            pass
    finally:
        replies.close()
    return replies.choices


def begun(backend: Held, n: int) -> asyncio.Task[list[Gathered]]:
    """The work of a call with ``n`` requests, three at a time."""
    requests = [ChatRequest(str(i)) for i in range(n)]
    return asyncio.create_task(finished(Replies(backend, requests, 100, at_a_time=3)))


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work(), 60)

    return asyncio.run(limited())


def test_a_cancelled_run_stops_its_requests_even_while_text_arrives() -> None:
    async def cancelled_after(n_turns: int) -> None:
        backend = Held()
        work = begun(backend, 1)
        await until(lambda: backend.given)
        backend.given[0].put(Tokens((("a", False),)))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        work.cancel()
        await until(lambda: backend.n_closed)
        await asyncio.wait([work])

    for n_turns in range(6):
        run(lambda: cancelled_after(n_turns))  # noqa: B023 (used at once)


def test_the_requests_of_a_call_enter_the_queue_a_few_at_a_time() -> None:
    async def check() -> None:
        backend, found = Held(), []
        work = begun(backend, 10)
        for n in (3, 4, 5, 6, 7, 8, 9, 10, 10, 10):
            await until(lambda: len(backend.given) >= n)  # noqa: B023 (used at once)
            found.append(len(backend.given))
            backend.given[len(found) - 1].put(DONE)
        assert found == [3, 4, 5, 6, 7, 8, 9, 10, 10, 10]
        assert [request.id for request in backend.requests] == [str(i) for i in range(10)]
        assert len(await work) == 10

    run(check)


def test_a_call_that_has_ended_sends_no_more_requests() -> None:
    async def check() -> None:
        backend = Held()
        work = begun(backend, 10)
        await until(lambda: len(backend.given) == 3)
        work.cancel()
        await asyncio.wait([work])
        for events in backend.given:
            events.put(DONE)
        for _ in range(20):  # what is handed over would have been taken
            await asyncio.sleep(0)
        assert len(backend.given) == 3

    run(check)


@pytest.mark.parametrize(
    "path",
    [
        *(CHAT, f"{CHAT}/input_tokens", TEXT, NATIVE, "/infill", "/tokenize", "/detokenize"),
        *("/v1/responses", "/v1/responses/input_tokens", "/apply-template", "/v1/embeddings"),
        *("/v1/messages", "/v1/messages/count_tokens"),
    ],
)
def test_work_ends_when_the_client_leaves_whatever_it_asked_for(path: str) -> None:
    body = {
        "messages": HELLO, "prompt": "a", "input": "a", "max_tokens": 5, "input_prefix": "a",
        "input_extra": [{"text": "a"}], "content": "a", "tokens": [1], "model": "m",
    }  # fmt: skip
    if "responses" in path:
        del body["prompt"]  # which is a template there
    backend = Held()

    async def call() -> None:
        sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if sent:
                return sent.pop()
            await until(lambda: backend.given)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        app = guard(endpoint(Service(backend)), "127.0.0.1")
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": [(b"host", b"localhost")],
            "query_string": b"", "server": ("localhost", 1),
        }  # fmt: skip
        await app(scope, receive, send)

    run(call)
    assert len(backend.given) == 1 and backend.n_closed >= 1


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
        assert {*http.get("/metrics").text.splitlines()} >= {
            "llamacpp:prompt_tokens_total 9.0",
            "llamacpp:predicted_tokens_seconds 20.0",
            "llamacpp:tokens_predicted_total 84.0",
            "llamacpp:requests_deferred 2.0",
        }


def test_clients_with_different_keys_have_different_memories() -> None:
    def memories(keys: tuple[str, ...], *used: str) -> list[str | None]:
        backend = Recording()
        with client(backend, keys) as http:
            for key in used:
                for path in (CHAT, TEXT, NATIVE):
                    body = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
                    answer = http.post(path, json=body, headers={"X-Api-Key": key})
                    assert answer.status_code == 200
        return [request.memory for request in backend.requests]

    found = memories(("first", "second"), "first", "second", "first")
    assert found[:3] == [found[0]] * 3 == found[6:]
    assert found[3:6] == [found[3]] * 3
    assert len({found[0], found[3], ""}) == 3
    assert memories((), "first") == memories(("first",), "first") == [""] * 3


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ("", ""),
        ("--host ::1", ""),
        ("--host 0.0.0.0", None),
        ("--api-key x", ""),
        ("--api-key x --host 0.0.0.0", ""),
        ("--api-key x --api-key y", None),
    ],
)
def test_all_clients_share_a_memory_only_on_this_machine_or_if_they_share_a_key(
    flags: str, memory: str | None
) -> None:
    assert common_memory(parse_flags(flags.split())) == memory


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture(scope="module")
def http(held: Held) -> Iterator[httpx.Client]:
    """A server with quick pings, whose replies are held."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replies, "PING_SECONDS", 0.01)
        patched.setattr(replies, "HEADERS_SECONDS", 0.1)
        with httpx.Client(base_url=served(held), timeout=60) as made:
            yield made


STREAMS = [
    (CHAT, {"messages": HELLO, "stream": True}),
    (TEXT, {"prompt": "a", "stream": True}),
    (NATIVE, {"prompt": "a", "stream": True}),
    ("/v1/responses", {"input": "a", "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("first", [Waiting(3), Waiting(1, loading=True), Opening("<think>"), None])
def test_a_stream_that_waits_has_its_headers_and_signs_of_life(
    http: httpx.Client, held: Held, path: str, body: dict[str, Any], first: Event | None
) -> None:
    held._events = () if first is None else (first,)
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        ping = "event: ping" if path == "/v1/responses" else ": ping"
        assert [next(line for line in lines if line == ping) for _ in range(2)] == [ping] * 2
        held.given[-1].put(Tokens((("hello", False),)))
        assert next(line for line in lines if line.startswith("data: ") and "hello" in line)
        held.given[-1].put(Failed("it broke"))
        (*_, last) = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert last.get("response", last)["error"]["message"] == "it broke"


@pytest.mark.parametrize(("path", "body"), STREAMS[:3])
@pytest.mark.parametrize("before", [(), (Opening("<think>"),)])
def test_what_is_wrong_before_a_stream_starts_has_a_status(
    http: httpx.Client, held: Held, path: str, body: dict[str, Any], before: tuple[Event, ...]
) -> None:
    held._events = (*before, Failed("no such thing", kind="invalid", param="top_p"))
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_p")


def written(request: ChatRequest, *texts: str) -> tuple[str, bool]:
    """What is written of a reply with these texts, and whether it was closed before its end."""
    backend = Held(*(Tokens(((text, False),)) for text in texts), DONE)
    n_closed = []

    async def check() -> str:
        made = Replies(backend, [request], 100)
        async for _ in made.events():
            await asyncio.sleep(0.002)
        n_closed.append(backend.n_closed)
        made.close()
        return made.choices[0].text

    return run(check), n_closed[0] > 0


@pytest.mark.parametrize(
    ("seconds", "texts", "is_closed"),
    [
        (1e-3, ("a", "b\n", "c"), True),
        (1e-3, ("a\n", "b", "c"), False),  # no new line after the time
        (100, ("a", "b\n", "c"), False),
        (0, ("a", "b\n", "c"), False),
    ],
)
def test_a_reply_that_has_had_its_time_ends_at_a_new_line(
    seconds: float, texts: tuple[str, ...], is_closed: bool
) -> None:
    assert written(ChatRequest("one", predict_seconds=seconds), *texts)[1] is is_closed


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
    request = ChatRequest("one", n_indent=n_indent)
    assert written(request, *parts) == (text, text != "".join(parts))


def tokens(*parts: tuple[str, Chance]) -> Tokens:
    return Tokens(
        tuple((text, False) for text, _ in parts),
        tuple(one.id for _, one in parts),
        tuple((one, ()) for _, one in parts),
    )


def shown(*events: Event, ends: tuple[int, ...] = ()) -> list[bytes]:
    gathered = Gathered(ends=ends)
    for event in events:
        gathered.take(event)
    return [own.piece for _, (own, _) in gathered.shown]


def chance(token: int, piece: bytes, logprob: float = -1.0) -> Chance:
    return Chance(token, piece, logprob)


def test_probabilities_are_those_of_the_tokens_that_are_shown() -> None:
    said = ("He", chance(1, b"He")), ("llo", chance(2, b"llo"))
    for end in ("", "</s>"):
        came = tokens(*said, (end, chance(9, b"</s>")))
        assert shown(came, DONE, ends=(9,)) == [b"He", b"llo"]
    # A stop string took away two tokens, and a part of one.
    first = tokens(*said, (" w", chance(3, b" wo")), ("", chance(4, b"r")))
    stopped = dataclasses.replace(DONE, stop_string="orld")
    assert shown(first, tokens(("", chance(5, b"ld"))), stopped) == [b"He", b"llo", b" wo"]
    # The first two bytes of a character have no text, and are shown.
    split = (("", chance(6, b"\xe2")), ("", chance(7, b"\x82")), ("€", chance(8, b"\xac")))
    assert shown(tokens(*split[:2])) == []
    whole = [b"\xe2", b"\x82", b"\xac", b"\xe2"]
    assert shown(tokens(*split[:2]), tokens(split[2], split[0]), DONE) == whole


def test_older_logprobs_have_offsets_of_characters_and_each_text_once() -> None:
    top = (chance(1, b"a", -0.5), chance(2, b"a", -0.7), chance(3, b"\xe2", -3.0))
    parts = [
        Shown("", (chance(0, b"<s>", math.nan), ())),
        Shown("", (chance(3, b"\xe2\x82", -3.0), top)),
        Shown("€", (chance(4, b"\xac", -2.0), top[:2])),
        Shown("ab", (chance(5, b"ab", -0.1), top)),
        Shown("c", (chance(6, b"c", -0.2), ())),
    ]
    found = legacy_logprobs(parts, at=7)
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


# What the server prints of its requests

SAID = Tokens((("a secret", False),), (1,))
SECRET = [{"role": "user", "content": "a secret"}]
SHORT = dataclasses.replace(
    DONE, finish_reason="length", n_tokens=2, n_first=2, n_drafted=0, n_accepted=0, n_reused=200
)


@pytest.mark.parametrize(
    ("path", "body", "events", "lines"),
    [
        (
            *("v1/chat/completions", {"messages": SECRET}, [SAID, DONE]),
            [
                "POST /v1/chat/completions 200: 228 prompt tokens, 0 cached, read at 912.0/s; "
                "first token after S; 84 tokens at 83.0/s, 52% drafted; stop"
            ],
        ),
        (
            *("v1/messages", {"messages": SECRET, "stream": True, "max_tokens": 9}),
            [Prefill(0, 227), Prefill(100, 227), Prefill(227, 227), SAID, SHORT],
            [
                "POST /v1/messages: 100 of 228 prompt tokens read (43%)",
                "POST /v1/messages 200: 228 prompt tokens, 200 cached, read at 112.0/s; "
                "first token after S; 2 tokens at 1.0/s, 0% drafted; length",
            ],
        ),
        (
            *("v1/responses", {"input": "a secret"}, [Failed("a secret is wrong", kind="invalid")]),
            ["POST /v1/responses 400: S; failed: invalid"],
        ),
        ("completion", {"prompt": {"a secret": 1}}, [], ["POST /completion 400: S"]),
        ("%1b%0asecret", {}, [], ["POST /%1b%0asecret 404: S"]),
    ],
)
def test_a_line_for_each_request_tells_its_figures_and_its_end_but_not_its_text(
    path: str,
    body: dict[str, object],
    events: list[Event],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(log, "perf_counter", lambda: float(next(seconds)))
    with client(FakeBackend(events)) as http:
        for method, where in (("POST", path), ("GET", "health"), ("GET", "page/nothing")):
            http.request(method, where, json=body)
    told = capsys.readouterr().err
    assert re.sub(r"(?<=: )[\d.]+ s|(?<=after )-?[\d.]+ s", "S", told).splitlines() == lines
