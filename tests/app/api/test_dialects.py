"""What is asked, and how replies end, fail and are refused, in the words of each API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.worker.messages import Event, Failed, Tokens, Waiting
from tests.support.fake_backend import FakeBackend
from tests.support.fake_endpoint import THOUGHT, done, served

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "stop": ["END"]},
    "/v1/completions": {"prompt": "Hi", "stop": ["END"]},
    "/completion": {"prompt": "Hi", "stop": ["END"]},
    "/v1/responses": {"model": "any", "input": "Hi", "stop": ["END"]},
    "/v1/messages": {"model": "any", "max_tokens": 9, "messages": HELLO, "stop_sequences": ["END"]},
}
CHAT, TEXT, NATIVE, RESPONSES, MESSAGES = BODIES


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def http(backend: FakeBackend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served(backend), timeout=60) as made:
        yield made


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = {"type": "json_schema", "name": "x", "schema": SCHEMA}
FUNCTION = {"name": "f", "parameters": {}}
TOOL = {"type": "function", "function": FUNCTION}
PLAIN_TOOL = {"tools": [{"type": "function", **FUNCTION}], "parallel_tool_calls": False}
ITS_TOOL = {
    "tools": [{"name": "f", "input_schema": {}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}
SAME = {"seed": 5, "temperature": 0.5, "top_k": 7, "speculation": {"method": "ar"}}


def everywhere(**fields: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(BODIES, fields)


# By API what is asked there, and what the engine gets.
ASKED: list[tuple[dict[str, dict[str, Any]], dict[str, Any]]] = [
    (everywhere(**SAME), {"method": "ar"}),
    (everywhere(speculation={"memory": False}), {"memory": None}),
    (everywhere(), {"stop": ("END",), "parallel_tool_calls": True, "tools": ()}),
    (
        {
            **everywhere(max_tokens=7),
            NATIVE: {"n_predict": 7},
            RESPONSES: {"max_output_tokens": 7},
        },
        {"max_tokens": 7},
    ),
    (
        {
            CHAT: {"tools": [TOOL], "parallel_tool_calls": False},
            RESPONSES: PLAIN_TOOL,
            MESSAGES: ITS_TOOL,
        },
        {"tool_choice": "auto", "parallel_tool_calls": False},
    ),
    (
        {
            CHAT: {"reasoning_effort": "none"},
            RESPONSES: {"reasoning": {"effort": "none"}},
            MESSAGES: {"thinking": {"type": "disabled"}},
        },
        {"thinking": False},
    ),
]
SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"json_schema": SCHEMA},
    {"json_schema": SCHEMA},
    {"text": {"format": JSON}},
    {"output_config": {"format": JSON}},
    {"output_format": JSON},
]


@pytest.mark.parametrize(("asked", "expected"), ASKED)
def test_the_engine_is_asked_for_the_same(
    http: httpx.Client,
    backend: FakeBackend,
    asked: dict[str, dict[str, Any]],
    expected: dict[str, Any],
) -> None:
    for path, more in asked.items():
        backend.script = [[done()]]
        assert http.post(path, json={**BODIES[path], **more}).status_code == 200, path
        request = backend.requests[-1]
        assert {name: getattr(request, name) for name in expected} == expected, path
        assert [tool["function"]["name"] for tool in request.tools] == ["f"] * ("tools" in more)
        for name in ("seed", "temperature", "top_k"):
            assert name not in more or request.sampling[name] == more[name], path


def test_a_reply_is_held_to_the_same_schema(http: httpx.Client, backend: FakeBackend) -> None:
    for path, more in zip([*BODIES, MESSAGES], SCHEMAS, strict=True):
        backend.script = [[done()]]
        assert http.post(path, json={**BODIES[path], **more}).status_code == 200, path
        assert backend.requests[-1].sampling["json_schema"] == SCHEMA, path


def end_of(path: str, reply: dict[str, Any]) -> Any:
    """Why a whole reply, or the last part of a streamed one, says that it ended."""
    if path == NATIVE:
        return reply["stop_type"]
    if path == MESSAGES:
        return reply["stop_reason"], reply["stop_sequence"]
    if path == RESPONSES:
        return reply["status"], (reply["incomplete_details"] or {}).get("reason")
    return reply["choices"][0]["finish_reason"]


def streamed(http: httpx.Client, path: str) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
        if answer.status_code != 200:
            return [json.loads(answer.read())]
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if "data: " in line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


SAID = Tokens((("a", False),), (1,))
CUT = ("length", "length", "limit", ("incomplete", "max_output_tokens"), ("max_tokens", None))
COMPLETE = ("completed", None)


@pytest.mark.parametrize(
    ("end", "ends"),
    [
        (done(), ("stop", "stop", "eos", COMPLETE, ("end_turn", None))),
        (done("length"), CUT),
        (done("context"), CUT),
        (done(stop_string="END"), ("stop", "stop", "word", COMPLETE, ("stop_sequence", "END"))),
        # The chat format's own.
        (done(stop_string="<|turn|>"), ("stop", "stop", "word", COMPLETE, ("end_turn", None))),
    ],
)
def test_a_reply_says_why_it_ended(
    http: httpx.Client, backend: FakeBackend, end: Event, ends: tuple[Any, ...]
) -> None:
    for (path, body), expected in zip(BODIES.items(), ends, strict=True):
        backend.script = [[SAID, end]] * 2
        assert end_of(path, http.post(path, json=body).json()) == expected, path
        last = streamed(http, path)[-1 if path != MESSAGES else -2]
        part = {RESPONSES: last.get("response"), MESSAGES: last.get("delta")}.get(path, last)
        assert end_of(path, {"stop_sequence": None, **(part or {})}) == expected, path


FULL = "The request exceeds the available context size: it needs 600"
LONG = f"prompt is too long: 600 tokens > 512 maximum. {FULL}"


@pytest.mark.parametrize(
    ("failed", "status", "code", "message", "in_anthropics_words"),
    [
        (
            Failed("", "it needs 600", "too long", 600, 512),
            400,
            "context_length_exceeded",
            FULL,
            ("invalid_request_error", LONG),
        ),
        (
            Failed("busy", "too many wait", "busy"),
            503,
            503,
            "too many wait",
            ("overloaded_error", "too many wait"),
        ),
        (Failed("it broke", "it broke"), 500, 500, "it broke", ("api_error", "it broke")),
    ],
)
def test_what_fails_at_once_is_refused_and_later_ends_the_stream(
    http: httpx.Client,
    backend: FakeBackend,
    failed: Failed,
    status: int,
    code: object,
    message: str,
    in_anthropics_words: tuple[str, str],
) -> None:
    for path, body in BODIES.items():
        backend.script = [[failed], [failed], [Waiting(1), failed], [*THOUGHT, failed]]
        answer = http.post(path, json=body)
        refused = answer.json()["error"]
        assert answer.status_code == status
        if path == MESSAGES:
            assert (refused["type"], refused["message"]) == in_anthropics_words
        else:
            assert (refused["code"], refused["message"]) == (code, message), path
        (at_once,) = streamed(http, path)
        assert at_once["error"] == refused
        for _ in range(2):
            *events, last = streamed(http, path)
            if path == RESPONSES:
                response = last["response"]
                assert (last["type"], response["status"]) == ("response.failed", "failed")
                assert response["error"]["message"] == message
                assert (events[-1]["type"], events[-1]["message"]) == ("error", message)
            else:
                assert last["error"] == refused, path
