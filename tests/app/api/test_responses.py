"""``/v1/responses`` with the official client: events, items, and responses that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from app.api.errors import ApiError
from app.api.history import History
from app.api.requests import Tool, ToolChoice
from app.api.response_tools import Offered
from app.worker.messages import Failed, Tokens
from speculation.chat.tools import object_of
from tests.support.fake_backend import FakeBackend
from tests.support.fake_endpoint import THOUGHT, done, served


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def client(backend: FakeBackend) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served(backend)}v1", api_key="none", max_retries=0) as made:
        yield made


def brief(event: Any) -> tuple[Any, ...]:
    """An event's type, place, and what it adds or ends with."""
    kind = event.type.removeprefix("response.")
    if kind in ("output_item.added", "output_item.done"):
        return kind, event.output_index, event.item.type, event.item.status
    if kind in ("content_part.added", "content_part.done"):
        return kind, event.output_index, event.part.type, event.part.text
    if kind.endswith("delta"):
        return kind, event.output_index, event.delta
    if kind.endswith("text.done"):
        return kind, event.output_index, event.text
    return (kind, event.response.status)


THOUGHT_EVENTS = [
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
]


def test_a_stream_has_the_events_of_the_api_and_ends_with_the_whole_response(
    client: OpenAI, backend: FakeBackend
) -> None:
    backend.script = [[*THOUGHT, done()]] * 3
    events = list(client.responses.create(model="any", input="Hi", stream=True))
    assert [brief(event) for event in events] == [
        *THOUGHT_EVENTS,
        ("output_item.done", 1, "message", "completed"),
        ("completed", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(16))
    last: Any = events[-1]
    whole = client.responses.create(model="any", input="Hi")
    with client.responses.stream(model="any", input="Hi") as stream:
        gathered = stream.get_final_response()
    for found in (last.response, whole, gathered):
        assert (found.status, found.output_text, found.model) == ("completed", "Hello", "tiny")
        thought: Any = found.output[0]
        assert thought.content[0].text == "hm"
        counts: Any = found.usage
        assert counts.model_dump(exclude_none=True) == {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 15,
        }


def test_the_last_item_of_a_reply_that_is_cut_or_fails_says_so(
    client: OpenAI, backend: FakeBackend
) -> None:
    backend.script = [[*THOUGHT, done("length")], [*THOUGHT, Failed("it broke", "it broke")]]
    events = list(client.responses.create(model="any", input="Hi", stream=True))
    assert [brief(event) for event in events][-2:] == [
        ("output_item.done", 1, "message", "incomplete"),
        ("incomplete", "incomplete"),
    ]
    events = list(client.responses.create(model="any", input="Hi", stream=True))
    assert [brief(event) for event in events[:-2]] == THOUGHT_EVENTS[:12]


def test_a_response_continues_an_earlier_one(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = [[Tokens(((text, False),), (1,)), done()] for text in "abcd"]
    first = client.responses.create(model="any", input="one", instructions="Be brief.")
    second = client.responses.create(
        model="any", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    )
    asked = backend.requests[-1].messages
    assert [(message["role"], message["content"]) for message in asked] == [
        ("user", "one"),
        ("assistant", "a"),
        ("user", "two"),
    ]
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == "a"
    client.responses.delete(first.id)
    unkept = client.responses.create(model="any", input="three", store=False)
    for id_ in (first.id, unkept.id, "resp_unknown"):
        with pytest.raises(NotFoundError, match="there is no response"):
            client.responses.create(model="any", input="x", previous_response_id=id_)


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


def test_items_become_messages_and_an_answers_items_one_message(
    client: OpenAI, backend: FakeBackend
) -> None:
    backend.script = [[done()]]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "ask"}]},
        {"type": "message", "role": "assistant", "content": "One moment."},
        {"type": "function_call", "call_id": "1", "name": "rain", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "sun", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "1", "output": "yes"},
        {"type": "function_call_output", "call_id": "2", "output": [
            {"type": "input_text", "text": "no"},
            {"type": "input_image", "image_url": "data:"},
        ]},
        {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "o"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    client.responses.create(model="any", input=items)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "rain", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "sun", "arguments": '{"a":1}'}},
    ]
    assert backend.requests[-1].messages == (
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "ask",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
        {"role": "tool", "tool_call_id": "2", "content": "no\n[image left out]"},
        {"role": "assistant", "content": "I cannot.", "reasoning_content": "o"},
        {"role": "user", "content": "Go on."},
    )


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
    client: OpenAI, backend: FakeBackend
) -> None:
    reply: list[Any] = [called(("read", "{}")), Tokens((("Yes.", False),), (2,)), done()]
    backend.script = [reply, reply]
    asked: dict[str, Any] = {"model": "any", "input": "Hi", "tools": [FUNCTION]}
    assert [item.type for item in client.responses.create(**asked).output] == [
        "function_call",
        "message",
    ]
    *_, last = client.responses.create(**asked, stream=True)
    assert [item.type for item in last.response.output] == ["function_call", "message"]


def test_codex_tools_are_offered_called_and_read_again(
    client: OpenAI, backend: FakeBackend, caplog: pytest.LogCaptureFixture
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
        whole = client.responses.create(**asked, input=before, tool_choice="required")
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

    events = list(client.responses.create(**asked, input=before, stream=True))
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
    client.responses.create(**asked, input=again, tool_choice={"type": "function", "name": "query"})
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


def test_names_of_tools_in_namespaces_are_short_and_no_two_are_equal() -> None:
    long = {
        "type": "namespace",
        "name": "a" * 40,
        "tools": [{"name": "b" * 40}, {"name": "c" * 40}],
    }
    same = [
        {"type": "namespace", "name": "a__b", "tools": [{"name": "c"}]},
        {"type": "namespace", "name": "a", "tools": [{"name": "b__c"}, {"name": "b__c"}]},
        {"name": "a__b__c"},
    ]
    offered = Offered(Tool.model_validate(tool) for tool in [long, *same])
    names = [tool.name for tool in offered.functions]
    assert len(names) == len(set(names)) == 5 and max(map(len, names)) == 64
    pairs = [("a" * 40, "c" * 40), ("a__b", "c"), ("a", "b__c"), ("", "a__b__c")]
    for namespace, name in pairs:
        call = offered.call(offered.name(namespace, name))
        assert (call.get("namespace", ""), call["name"]) == (namespace, name)
        choice = ToolChoice(name=name, namespace=namespace)
        assert offered.choice(choice) == ToolChoice(name=offered.name(namespace, name))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"background": True}, "background is not supported: stream the response"),
        ({"conversation": "conv_1"}, "conversation is not supported: give previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"tool_choice": {"type": "web_search"}}, "tools of the type 'web_search' do not run here"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "names 'f', which is not among"),
        ({"tool_choice": "required"}, "'required', but the request has no tools that run here"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "no tools that run here"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type: Input should be"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\].type: .* \(got 'computer_call'"),
        ({"input": [{"content": "x"}]}, r"input\[0\]: .*message needs a role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "a part of type 'input_file' is not supported",
        ),
        ({"input": [{"role": "judge", "content": "x"}]}, r"input\[0\].role"),
        ({"top_k": "many"}, "top_k"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: OpenAI, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequestError, match=reason):
        client.responses.create(model="any", input="Hi", extra_body=more)


def test_some_tools_may_be_allowed_and_one_reply_is_written(
    client: OpenAI, backend: FakeBackend
) -> None:
    backend.script = [[done()]]
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": {}, "strict": True} for name in ("f", "g")
    ]
    found = client.responses.create(
        model="any",
        input="Hi",
        tools=[*tools, {"type": "web_search"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}]},
        extra_body={"n": 3, "n_cmpl": 3},
    )
    asked = backend.requests[-1]
    assert [tool["function"]["name"] for tool in asked.tools] == ["f", "g"]
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    assert asked.tool_choice == {"type": "allowed_tools", **some}
    assert [item.type for item in found.output] == ["message"]  # one item at least
