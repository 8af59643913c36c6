"""How replies are written, end, fail and are refused, in the words of each API and its client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI
from starlette.testclient import TestClient

from app.api.errors import ApiError
from app.api.history import History
from app.worker.messages import Event, Failed, Tokens, Waiting
from speculation.chat.tools import object_of
from tests.support.fake_backend import FakeBackend
from tests.support.fake_endpoint import THOUGHT, client, done, served

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
def http(backend: FakeBackend) -> Iterator[TestClient]:
    with client(backend, alias="tiny") as made:
        yield made


def whole(http: TestClient, path: str) -> Any:
    return http.post(path, json=BODIES[path]).json()


def streamed(http: TestClient, path: str, **more: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json={**BODIES[path], "stream": True, **more})
    if answer.status_code != 200:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def brief(event: dict[str, Any]) -> Any:
    """What an event adds or ends, without what is the same in all of them."""
    if "choices" in event:
        (choice,) = event["choices"]
        return choice.get("delta", choice.get("text")), choice["finish_reason"]
    if "stop" in event:
        return event["content"], event["stop"]
    kind = event["type"].removeprefix("response.")
    if kind == event["type"]:  # of /v1/messages
        return kind, *(value for name, value in event.items() if name not in ("type", "message"))
    if "response" in event:
        return kind, event["response"]["status"]
    added = event.get("item") or event.get("part") or {}
    last = added.get("status", added.get("text", event.get("delta", event.get("text"))))
    return (kind, event["output_index"], *([added["type"]] if added else []), last)


COUNTS = {
    "input_tokens": 7,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 5,
}
# fmt: off
STREAMS: dict[str, list[Any]] = {
    CHAT: [
        ({"role": "assistant", "content": None}, None), ({"reasoning_content": "hm"}, None),
        ({"content": "Hel"}, None), ({"content": "lo"}, None), ({}, "stop"),
    ],
    TEXT: [("hm</think>\n\nHel", None), ("lo", None), ("", "stop")],
    NATIVE: [("hm</think>\n\nHel", False), ("lo", False), ("", True)],
    RESPONSES: [
        ("created", "in_progress"),
        ("in_progress", "in_progress"),
        ("output_item.added", 0, "reasoning", "in_progress"),
        ("content_part.added", 0, "reasoning_text", ""),
        ("reasoning_text.delta", 0, "hm"),
        ("reasoning_text.done", 0, "hm"),
        ("content_part.done", 0, "reasoning_text", "hm"),
        ("output_item.done", 0, "reasoning", "completed"),
        ("output_item.added", 1, "message", "in_progress"),
        ("content_part.added", 1, "output_text", ""),
        ("output_text.delta", 1, "Hel"),
        ("output_text.delta", 1, "lo"),
        ("output_text.done", 1, "Hello"),
        ("content_part.done", 1, "output_text", "Hello"),
        ("output_item.done", 1, "message", "completed"),
        ("completed", "completed"),
    ],
    MESSAGES: [
        ("message_start",),
        ("content_block_start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "hm"}),
        ("content_block_delta", 0, {"type": "signature_delta", "signature": ""}),
        ("content_block_stop", 0),
        ("content_block_start", 1, {"type": "text", "text": ""}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "Hel"}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "lo"}),
        ("content_block_stop", 1),
        ("message_delta", {"stop_reason": "end_turn", "stop_sequence": None}, COUNTS),
        ("message_stop",),
    ],
}
# fmt: on


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_the_events_of_its_api(
    http: TestClient, backend: FakeBackend, path: str
) -> None:
    backend.script = [[*THOUGHT, done()]]
    events = streamed(http, path)
    assert [brief(event) for event in events] == STREAMS[path]
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(16))
    if path == MESSAGES:
        begun = events[0]["message"]
        assert (begun["model"], begun["content"]) == ("tiny", [])
        assert begun["usage"] == {**COUNTS, "output_tokens": 0}


def test_the_last_item_of_a_response_that_is_cut_or_fails_says_so(
    http: TestClient, backend: FakeBackend
) -> None:
    backend.script = [[*THOUGHT, done("length")], [*THOUGHT, Failed("it broke", "it broke")]]
    assert [brief(event) for event in streamed(http, RESPONSES)][-2:] == [
        ("output_item.done", 1, "message", "incomplete"),
        ("incomplete", "incomplete"),
    ]
    events = streamed(http, RESPONSES)[:-2]
    assert [brief(event) for event in events] == STREAMS[RESPONSES][:12]


def end_of(path: str, reply: dict[str, Any]) -> Any:
    """Why a whole reply, or the last part of a streamed one, says that it ended."""
    if path == NATIVE:
        return reply["stop_type"]
    if path == MESSAGES:
        return reply["stop_reason"], reply["stop_sequence"]
    if path == RESPONSES:
        return reply["status"], (reply["incomplete_details"] or {}).get("reason")
    return reply["choices"][0]["finish_reason"]


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
    http: TestClient, backend: FakeBackend, end: Event, ends: tuple[Any, ...]
) -> None:
    for path, expected in zip(BODIES, ends, strict=True):
        backend.script = [[SAID, end]] * 2
        assert end_of(path, whole(http, path)) == expected, path
        last = streamed(http, path)[-1 if path != MESSAGES else -2]
        part = {RESPONSES: last.get("response"), MESSAGES: last.get("delta")}.get(path, last)
        assert end_of(path, part or {}) == expected, path


FULL = "The request exceeds the available context size: it needs 600"
INVALID, LONG = "invalid_request_error", f"prompt is too long: 600 tokens > 512 maximum. {FULL}"


@pytest.mark.parametrize(
    ("failed", "status", "code", "message", "in_anthropics_words"),
    [
        (
            *(Failed("", "it needs 600", "too long", 600, 512), 400, "context_length_exceeded"),
            *(FULL, (INVALID, LONG)),
        ),
        (
            *(Failed("busy", "too many wait", "busy"), 503, 503),
            *("too many wait", ("overloaded_error", "too many wait")),
        ),
        (Failed("it broke", "it broke"), 500, 500, "it broke", ("api_error", "it broke")),
    ],
)
def test_what_fails_at_once_is_refused_and_later_ends_the_stream(
    http: TestClient,
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
        assert (
            path != CHAT
            or status != 400
            or refused
            == {
                "message": FULL,
                "type": "exceed_context_size_error",
                "param": None,
                "code": "context_length_exceeded",
                "n_prompt_tokens": 600,
                "n_ctx": 512,
            }
        )  # which clients look for
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


# With the official clients


@pytest.fixture(scope="module")
def address(backend: FakeBackend) -> str:
    return served(backend)


@pytest.fixture(scope="module")
def openai(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_is_the_same_whole_at_its_streams_end_and_gathered(
    openai: OpenAI, backend: FakeBackend
) -> None:
    backend.script = [[*THOUGHT, done()]] * 3
    *_, last = openai.responses.create(model="any", input="Hi", stream=True)
    whole = openai.responses.create(model="any", input="Hi")
    with openai.responses.stream(model="any", input="Hi") as stream:
        gathered = stream.get_final_response()
    found: Any
    for found in (last.response, whole, gathered):  # type: ignore[union-attr]
        assert (found.status, found.output_text, found.model) == ("completed", "Hello", "tiny")
        assert found.output[0].content[0].text == "hm"
        assert found.usage.model_dump(exclude_none=True) == {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 15,
        }
    backend.script = [[done()]]
    empty = openai.responses.create(model="any", input="Hi")
    assert [item.type for item in empty.output] == ["message"]  # one item at least


def test_a_message_is_the_same_whole_and_gathered(address: str, backend: FakeBackend) -> None:
    backend.script = [[*THOUGHT, done()]] * 2
    asked: Any = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked, model="any")
        with client.messages.stream(**asked, model="any") as stream:
            gathered = stream.get_final_message()
    for found in (whole, gathered):
        assert [block.model_dump(exclude_none=True) for block in found.content] == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Hello"},
        ]
        assert (found.stop_reason, found.role, found.model) == ("end_turn", "assistant", "tiny")
        assert found.usage.model_dump(exclude_none=True) == COUNTS


def test_a_response_continues_an_earlier_one(openai: OpenAI, backend: FakeBackend) -> None:
    backend.script = [[Tokens(((text, False),), (1,)), done()] for text in "abcd"]
    first = openai.responses.create(model="any", input="one", instructions="Be brief.")
    second = openai.responses.create(
        model="any", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    )
    asked = backend.requests[-1].messages
    assert [(message["role"], message["content"]) for message in asked] == [
        ("user", "one"),
        ("assistant", "a"),
        ("user", "two"),
    ]
    assert second.previous_response_id == first.id
    assert openai.responses.retrieve(first.id).output_text == "a"
    openai.responses.delete(first.id)
    unkept = openai.responses.create(model="any", input="three", store=False)
    for id_ in (first.id, unkept.id, "resp_unknown"):
        with pytest.raises(NotFoundError, match="there is no response"):
            openai.responses.create(model="any", input="x", previous_response_id=id_)


def test_the_least_recently_used_responses_are_forgotten() -> None:
    history = History(most_bytes=80)
    for name in ("a", "b"):
        history.add("me", {"id": name}, [{"content": name}])
    history.get("a", "me")
    history.add("me", {"id": "c"}, [{"content": "c"}])
    for id_, owner in (("b", "me"), ("a", "other")):
        with pytest.raises(ApiError, match="it was not stored, or has been forgotten"):
            history.get(id_, owner)
    assert history.get("a", "me").items == [{"content": "a"}]
    history.add("me", {"id": "d"}, [{"content": "d" * 30}])  # 57 bytes, and 28 for each other one
    with pytest.raises(ApiError):
        history.get("a", "me")
    history.get("d", "me", remove=True)
    history.add("me", {"id": "e"}, [{"content": "e" * 30}])
    assert len(history.get("e", "me").items) == 1


FUNCTION = {"type": "function", "name": "read", "description": "Reads.", "parameters": {}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.*/"},
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {}}
SPACE = {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [FUNCTION]}
LITE = {"type": "namespace", "name": "functions", "tools": [FUNCTION, PATCH]}
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def called(*calls: tuple[str, str]) -> Tokens:
    text = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )
    return Tokens(((text, False),), (1,))


def test_a_whole_response_has_its_items_in_the_order_of_the_stream(
    openai: OpenAI, backend: FakeBackend
) -> None:
    reply: list[Any] = [called(("read", "{}")), Tokens((("Yes.", False),), (2,)), done()]
    backend.script = [reply, reply]
    asked: dict[str, Any] = {"model": "any", "input": "Hi", "tools": [FUNCTION]}
    assert [item.type for item in openai.responses.create(**asked).output] == [
        "function_call",
        "message",
    ]
    *_, last = openai.responses.create(**asked, stream=True)
    assert [item.type for item in last.response.output] == ["function_call", "message"]


def test_codex_tools_are_offered_called_and_read_again(
    openai: OpenAI, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    made = (
        ("read", '{"a": "x"}'),
        ("mcp__fs__read", '{"path": "b"}'),
        ("apply_patch", r'{"input": "+ \u00e9\n"}'),
        ("tool_search", '{"query": "c"}'),
    )
    backend.script = [[called(*made), done()], [called(*made), done()], [done()]]
    more: Any = {"type": "additional_tools", "role": "developer", "tools": [LITE, SPACE, SEARCH]}
    tools: Any = [SPACE, {"type": "image_generation"}, {"type": "web\n"}]
    asked: dict[str, Any] = {"model": "any", "tools": tools, "store": False}
    before: Any = [more, {"role": "user", "content": "Hi"}]
    with caplog.at_level("WARNING"):
        whole = openai.responses.create(**asked, input=before, tool_choice="required")
    assert "nobody here can run: 'image_generation', 'web\\n'" in caplog.text
    offered = backend.requests[-1].tools
    assert [tuple(tool["function"].values()) for tool in offered] == [
        ("mcp__fs__read", "Files.\n\nReads.", {}, False),
        ("read", "Reads.", {}, False),
        ("apply_patch", "Edits.\n\nThe input follows this grammar:\nstart: /.*/", INPUT, False),
        ("tool_search", "Finds.", {}, False),
    ]
    items: Any = [item.model_dump(exclude={"id", "status", "call_id"}) for item in whole.output]
    expected = [
        {"type": "function_call", "name": "read", "arguments": '{"a": "x"}'},
        {"type": "function_call", "name": "read", "arguments": '{"path": "b"}'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "+ é\n"},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "c"}},
    ]
    spaces = [item.pop("namespace", None) for item in items]
    assert spaces == ["functions", "mcp__fs", "functions", None]
    assert [{k: v for k, v in item.items() if v is not None} for item in items] == expected

    events = list(openai.responses.create(**asked, input=before, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events][2:-1]
    added, ended = ["output_item.added"], ["output_item.done"]
    function = ["function_call_arguments.delta", "function_call_arguments.done"]
    custom = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    per_call = [added + two + ended for two in (function, function, custom, [])]
    assert kinds == [kind for kinds in per_call for kind in kinds]
    streamed: Any = events[-1]
    dumped = [item.model_dump(exclude={"id", "call_id"}) for item in streamed.response.output]
    assert dumped == [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]

    found = {**SPACE, "name": "mcp__db", "tools": [{**FUNCTION, "name": "query"}]}
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "p", "output": "done"},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [found]},
    ]
    again = [*before, *(item.to_dict() for item in whole.output), *outputs]
    openai.responses.create(**asked, input=again, tool_choice={"type": "function", "name": "query"})
    request = backend.requests[-1]
    assert request.listed_tools == offered and len(request.tools) == 5
    assert isinstance(request.tool_choice, dict)
    assert request.tool_choice["function"] == {"name": "mcp__db__query"}
    functions = [call["function"] for call in request.messages[1]["tool_calls"]]
    read = [(each["name"], object_of(each["arguments"])) for each in functions]
    assert read == [(name, json.loads(arguments)) for name, arguments in made]
    results = [message["content"] for message in request.messages[2:]]
    query = '{"name":"mcp__db__query","description":"Files.\\n\\nReads.","parameters":{}}'
    assert results == ["1", "done", f"<function>{query}</function>"]
