"""``/v1/messages`` with Anthropic's official client: events, messages and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from anthropic import Anthropic, APIStatusError, BadRequestError

from app.worker.messages import ChatRequest
from tests.support.fake_backend import FakeBackend
from tests.support.fake_endpoint import THOUGHT, done, served

HELLO: Any = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "any", "max_tokens": 9, "messages": HELLO}
COUNTS = {
    "input_tokens": 7,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 5,
}


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def client(backend: FakeBackend) -> Iterator[Anthropic]:
    with Anthropic(base_url=served(backend), api_key="none", max_retries=0) as made:
        yield made


def plain(event: Any) -> dict[str, Any]:
    found: dict[str, Any] = event.model_dump(exclude_none=True)
    return found


def test_a_stream_has_the_events_of_the_api_and_makes_the_whole_message(
    client: Anthropic, backend: FakeBackend
) -> None:
    backend.script = [[*THOUGHT, done()]] * 3
    events = [plain(event) for event in client.messages.create(**ASKED, stream=True)]
    start = events.pop(0)
    assert start["type"] == "message_start"
    assert (start["message"]["model"], start["message"]["content"]) == ("tiny", [])
    assert start["message"]["usage"] == {**COUNTS, "output_tokens": 0}
    thinking, text = {"type": "thinking_delta"}, {"type": "text_delta"}
    assert events == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {**thinking, "thinking": "hm"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "signature_delta", "signature": ""},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "text", "text": ""},
        },
        {"type": "content_block_delta", "index": 1, "delta": {**text, "text": "Hel"}},
        {"type": "content_block_delta", "index": 1, "delta": {**text, "text": "lo"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": COUNTS},
        {"type": "message_stop"},
    ]
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        gathered = stream.get_final_message()
    for found in (whole, gathered):
        assert [plain(block) for block in found.content] == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Hello"},
        ]
        assert (found.stop_reason, found.role, found.model) == ("end_turn", "assistant", "tiny")
        assert plain(found.usage) == COUNTS


def test_errors_have_the_form_of_the_api(client: Anthropic, backend: FakeBackend) -> None:
    def refusal(kind: type[APIStatusError] = BadRequestError, **more: Any) -> Any:
        with pytest.raises(kind) as refused:
            client.messages.create(**{**ASKED, **more})
        return refused.value.body

    def error(kind: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}}

    assert refusal(extra_body={"container": "c"}) == error(
        "invalid_request_error", "container is not supported: no code runs here"
    )
    assert refusal(messages=[])["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in refusal(max_tokens=0)["error"]["message"]
    video: Any = [{"role": "user", "content": [{"type": "video"}]}]
    message = refusal(messages=video)["error"]["message"]
    assert message.startswith("a part of type 'video' is not supported")


HEADER = "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=1a2b;"


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        f"{HEADER}\nBe brief.",
        [{"type": "text", "text": HEADER}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": f"{HEADER}\n\nBe brief."}],
    ],
)
def test_a_header_that_changes_with_each_request_is_not_in_the_prompt(
    client: Anthropic, backend: FakeBackend, system: Any
) -> None:
    backend.script = [[done()]] * 2
    client.messages.create(**ASKED, system=system)
    system_, user = backend.requests[-1].messages
    assert system_ == {"role": "system", "content": "Be brief."}
    client.messages.create(**ASKED, system=HEADER)
    assert backend.requests[-1].messages == (user,)


def test_a_request_becomes_a_chat_completion(client: Anthropic, backend: FakeBackend) -> None:
    backend.script = [[done()]]
    messages: Any = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ask", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "1", "name": "rain", "input": {"a": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Go on."},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [
                        {"type": "text", "text": "yes"},
                        {"type": "tool_reference", "tool_name": "sun"},
                        {"type": "search_result", "title": "x"},
                    ],
                },
            ],
        },
    ]
    tools: Any = [
        {"name": "rain", "description": "d", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    client.messages.create(
        model="any",
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=messages,
        tools=tools,
        tool_choice={"type": "tool", "name": "rain", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"top_k": 5},
        stop_sequences=["END"],
    )
    asked = backend.requests[-1]
    told = asked.messages[2]
    assert [(message["role"], message["content"]) for message in asked.messages] == [
        ("system", "Be brief."),
        ("user", "weather?"),
        ("assistant", "One moment."),
        ("tool", "yes\nThe tool sun can be called.\n[search_result left out]"),
        ("user", "Go on."),
    ]
    (call,) = told["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("1", "rain")
    assert call["function"]["arguments"] == {"a": "é"}
    assert asked.messages[3]["tool_call_id"] == "1"
    assert [tool["function"]["name"] for tool in asked.tools] == ["rain"]
    assert isinstance(asked.tool_choice, Mapping)
    assert asked.tool_choice["function"] == {"name": "rain"}
    assert not asked.parallel_tool_calls
    assert (asked.max_tokens, asked.stop, asked.sampling["top_k"]) == (9, ("END",), 5)


def test_a_deferred_tool_is_defined_where_a_search_finds_it(
    client: Anthropic, backend: FakeBackend
) -> None:
    def asked(tools: Any, messages: Any) -> ChatRequest:
        backend.script = [[done()]]
        client.messages.create(model="any", max_tokens=9, tools=tools, messages=messages)
        return backend.requests[-1]

    def names(tools: Any) -> list[str]:
        return [tool["function"]["name"] for tool in tools]

    schema = {"type": "object", "properties": {"é": {}}}
    search: Any = {"name": "Search", "input_schema": {}}
    write: Any = {"name": "Write", "input_schema": {}}
    late = {"input_schema": schema, "description": "d", "defer_loading": True}
    fetch, other = ({"name": name, **late} for name in ("Fetch", "Other"))
    told: Any = [{"type": "text", "text": "# Environment\nLinux"}]
    empty: Any = {"role": "system", "content": []}
    first = asked([search, other, write], [*HELLO, {"role": "system", "content": told}, empty])
    assert names(first.tools) == ["Search", "Write"]

    found = [{"type": "tool_reference", "tool_name": name} for name in ("Fetch", "Write", "Gone")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    after = [
        *HELLO,
        {"role": "system", "content": "# Environment\nLinux"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "Search", "input": {}}],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "Tool loaded."}]},
    ]
    second = asked([search, fetch, other, write], after)
    assert names(second.tools) == ["Search", "Fetch", "Write"]
    assert second.messages[3]["content"] == (
        '<function>{"name":"Fetch","description":"d","parameters":'
        '{"type":"object","properties":{"é":{}}}}</function>\n'
        "The tool Write can be called.\nThe tool Gone can be called."
    )
    assert second.listed_tools == first.listed_tools == first.tools
    assert second.messages[:2] == first.messages

    elsewhere = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert names(asked([elsewhere, fetch, write], HELLO).listed_tools) == ["Fetch", "Write"]


@pytest.mark.parametrize(
    ("given", "choice", "thinking", "template"),
    [
        ({}, "auto", False, {}),
        ({"tool_choice": {"type": "any"}}, "required", False, {}),
        ({"tool_choice": {"type": "none"}}, "none", False, {}),
        ({"thinking": {"type": "disabled"}}, "auto", False, {}),
        ({"thinking": {"type": "adaptive"}}, "auto", True, {"enable_thinking": True}),
    ],
)
def test_thinking_is_off_unless_it_is_asked_for(
    client: Anthropic,
    backend: FakeBackend,
    given: dict[str, Any],
    choice: str,
    thinking: bool | None,
    template: dict[str, Any],
) -> None:
    backend.script = [[done()]]
    client.messages.create(**ASKED, tools=[{"name": "f", "input_schema": {}}], extra_body=given)
    asked = backend.requests[-1]
    assert (asked.tool_choice, asked.thinking) == (choice, thinking)
    assert asked.template_kwargs == template
