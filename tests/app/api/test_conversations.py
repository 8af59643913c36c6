"""Conversations as clients send them, and what the engine gets of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.service import Service
from app.server import endpoint, guard
from tests.support.fake_backend import Recording

HELLO: dict[str, Any] = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
NOW = {"name": "now", "arguments": {}}
TOOL = {"type": "function", "function": {"name": "now", "strict": True}}


@pytest.fixture
def backend() -> Recording:
    return Recording()


@pytest.fixture
def http(backend: Recording) -> Iterator[TestClient]:
    app = guard(endpoint(Service(backend)), "127.0.0.1")
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def asked(http: TestClient, **body: Any) -> Any:
    return http.post("/v1/chat/completions", json={"messages": [HELLO], **body})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": None}, {"content": ""}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, ""]},
            {"content": "No.\n\n"},
        ),
        (
            {"role": "assistant", "content": "b", "reasoning_content": "so"},
            {"content": "b", "reasoning_content": "so"},
        ),
        (
            {"role": "assistant", "content": "b", "reasoning": "so"},
            {"content": "b", "reasoning_content": "so"},
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "b"}],
            },
            {"content": "b", "reasoning_content": "so"},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "what?"}, IMAGE, "a", {"text": ""}],
            },
            {"content": "what?\n[image left out]\na\n"},
        ),
        (
            {"role": "tool", "tool_call_id": "1", "content": [IMAGE]},
            {"content": "[image left out]", "tool_call_id": "1"},
        ),
        (
            {"role": "tool", "tool_call_id": "1", "content": {"a": [1]}},
            {"content": '{"a": [1]}', "tool_call_id": "1"},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": NOW}]},
            {"content": "", "tool_calls": [{"type": "function", "function": NOW}]},
        ),
    ],
)
def test_messages_are_taken_as_clients_send_them(
    http: TestClient, backend: Recording, message: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert asked(http, messages=[HELLO, message, HELLO]).status_code == 200
    assert backend.requests[0].messages[1] == {"role": message["role"], **expected}


def test_what_is_no_text_is_refused_in_the_turn_that_is_to_be_answered(http: TestClient) -> None:
    for part in (IMAGE, {"type": "file", "file": {}}):
        answer = asked(http, messages=[HELLO, {"role": "user", "content": [part]}])
        assert answer.status_code == 400
        assert f"type '{part['type']}' is not supported" in answer.json()["error"]["message"]
    answer = asked(http, messages=[{"role": "user", "content": [{"type": "text"}]}])
    assert answer.json()["error"]["message"].startswith("messages[0].content[0]: ")
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    answer = asked(http, messages=[{"role": "user", "content": [sound]}, HELLO])
    assert "type 'input_audio' is not supported" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"reasoning_effort": "high"}, {"template_kwargs": {"reasoning_effort": "high"}}),
        ({"reasoning_effort": "none"}, {"template_kwargs": {}, "thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x", "y": 1}},
            {"template_kwargs": {"reasoning_effort": "x", "y": 1}, "thinking": None},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
        (
            {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"},
            {"thinking": True},
        ),
        ({"thinking_budget_tokens": 99}, {"thinking_budget": 99, "thinking": None}),
        ({"thinking_budget_tokens": 0}, {"thinking_budget": 0, "thinking": False}),
        ({"reasoning_budget_tokens": -1}, {"thinking_budget": None, "thinking": None}),
        ({"tools": [TOOL]}, {"tools": (TOOL,), "tool_choice": "auto"}),
    ],
)
def test_tools_and_reasoning_are_asked_for_in_the_words_of_several_programs(
    http: TestClient, backend: Recording, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert asked(http, **body).status_code == 200
    assert {name: getattr(backend.requests[0], name) for name in expected} == expected
