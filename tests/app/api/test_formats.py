"""The endpoint with models of several formats: their calls of tools, and their reasoning; and
bodies with one odd value, at every place of every API, which are never an error of the server's.

A grammar makes a model of random weights say what such models say.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, OpenAI
from starlette.testclient import TestClient

from app.worker import preparation, serving
from app.worker.messages import Loaded, ModelSpec
from speculation.sampling import SamplingParams
from tests.speculation.chat.tool_templates import FAMILIES
from tests.support.fake_endpoint import client as client_of
from tests.support.fake_endpoint import served
from tests.support.local_backend import LocalBackend
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
DIGITS = "digits\ndigits ::= [0-9] digits"  # without end
ASKED: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "a cat"}]}


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(backend: LocalBackend) -> Iterator[OpenAI]:
    url = f"{served(backend)}v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def load(backend: LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Loads a model with a template, and an opening mark at its end."""
    folder: Path = tmp_path_factory.mktemp("formats")
    model = write_tiny_gguf(folder / "tiny.gguf", n_ctx=4096)

    def load(template: str = FAMILIES["none"].template, opening: str = "") -> None:
        path = folder / "template.jinja"
        path.write_text(template + opening)
        spec = ModelSpec(str(model), n_threads=1, parallel=1, chat_template=str(path))
        assert isinstance(list(backend.load(spec))[-1], Loaded)

    return load


def saying(text: str, then: str = "") -> dict[str, str]:
    """Sampling that makes a model say a text, and then what a rule allows."""
    return {"grammar": f"root ::= {json.dumps(text)} {then}"}


def streamed(client: OpenAI, **asked: Any) -> tuple[dict[str, str], list[list[str]], str | None]:
    """The texts, the calls and the reason for the end of a streamed reply."""
    texts, calls, reason = {"content": "", "reasoning_content": ""}, [], None
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        for field in texts:
            texts[field] += getattr(delta, field, None) or ""
        for part in delta.tool_calls or ():
            assert part.function is not None
            if part.id is not None:
                calls.append([part.function.name or "", ""])
            calls[part.index][1] += part.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return texts, calls, reason


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a model say a text when it is asked for a conversation."""

    def say(*what: str) -> None:
        def held(*given: Any) -> SamplingParams:
            return replace(given[2], **saying(*what))

        monkeypatch.setattr(preparation, "_reply_grammar", held)

    return say


@pytest.mark.parametrize(
    "family",
    [
        *("json after a tag, one call", "names and json between marks", "a list of json, with ids"),
        *("an element for each argument", "bare keys", "none"),
    ],
)
def test_calls_of_tools_are_read_in_every_format(
    client: OpenAI, load: Callable[..., None], say: Callable[..., None], family: str
) -> None:
    template, text, _ = FAMILIES[family]
    load(template)
    asked = {**ASKED, "tools": TOOLS}
    content = None if text.startswith("<|python_tag|>") else "Well."
    say(f"{content or ''}{text}")
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == (content, "tool_calls")
    called: Any = [call.function for call in whole.message.tool_calls or ()]
    made = [[call.name, call.arguments] for call in called]
    read = [(tool, json.loads(given)) for tool, given in made]
    assert read == [("add", {"a": [1, "}"]}), ("now", {})]
    texts = {"content": content or "", "reasoning_content": ""}
    assert streamed(client, **asked) == (texts, made, "tool_calls")


def test_a_call_that_is_cut_says_why_and_can_be_in_a_later_conversation(
    client: OpenAI, load: Callable[..., None], say: Callable[..., None]
) -> None:
    for family in ("json between marks", "an element for each argument"):
        template, text, _ = FAMILIES[family]
        load(template)
        for cut, reason in (({"max_tokens": 120}, "length"), ({"stop": "77"}, "stop")):
            say(text[: text.index('"}"')], DIGITS if reason == "length" else '"777"')
            asked = {**ASKED, "tools": TOOLS, "seed": 1, **cut}
            whole: Any = client.chat.completions.create(**asked).choices[0]
            assert whole.finish_reason == reason
            (call,) = whole.message.tool_calls
            with pytest.raises(ValueError, match=r"delimiter|Expecting"):
                json.loads(call.function.arguments)
            assert streamed(client, **asked)[1:] == ([["add", call.function.arguments]], reason)
            result = {"role": "tool", "tool_call_id": call.id, "content": "none"}
            again: list[Any] = [*ASKED["messages"], whole.message, result]
            say("Yes.")
            after = client.chat.completions.create(model="any", messages=again)
            assert after.choices[0].message.content == "Yes."


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_reasoning_comes_apart_from_the_answer(
    client: OpenAI, load: Callable[..., None], opening: str
) -> None:
    load(opening=opening)
    before = "" if opening else "<think>\n"
    asked = {**ASKED, "extra_body": saying(f"{before}a dog <or> a cat\n</think>\n\na cat")}
    message = client.chat.completions.create(**asked).choices[0].message
    expected = {"content": "a cat", "reasoning_content": "a dog <or> a cat\n"}
    assert {name: getattr(message, name) for name in expected} == expected
    assert streamed(client, **asked) == (expected, [], "stop")


def test_a_full_queue_refuses_requests_until_there_is_room(
    client: OpenAI,
    load: Callable[..., None],
    backend: LocalBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load()
    monkeypatch.setattr(serving, "MOST_WAITING", 1)
    endless = {"grammar": "root ::= [a-z] root"}
    running = client.chat.completions.create(**ASKED, stream=True, extra_body=endless)
    next(running)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.chat.completions.create(**ASKED, max_tokens=2))
        wait_until(lambda: backend.report().n_waiting)
        with pytest.raises(InternalServerError) as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.body == {
            "message": "1 requests wait already; try again later",
            "type": "unavailable_error",
            "param": None,
            "code": 503,
        }
        running.close()
        assert waiting.result().choices[0].finish_reason == "length"


# Bodies with an odd value

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": ["x"], "anyOf": [{}], "allOf": [{}], "$ref": "#/$defs/b"},
        "b": {"type": ["string", "null"]},
    },
    "required": ["a"],
    "$defs": {"b": {"const": "x"}},
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}
# fmt: off
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
    {"type": "function_call", "call_id": "1", "name": "f", "namespace": "n", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
    {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
    {"type": "tool_search_output", "call_id": "3", "tools": [{"type": "function", "name": "g"}]},
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "c"}]},
    {"role": "user", "content": "b"},
]
BLOCKS = [
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
    {"type": "tool_reference", "tool_name": "f"},
    {"type": "document", "source": {"type": "text", "data": "x"}},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                     {"role": "assistant", "reasoning_content": "r", "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "1", "content": "x"},
                     {"role": "user", "content": "b"}],
        "tools": [TOOL], "stop": ["q"], "samplers": ["top_k"], "model": "m", "max_tokens": 1,
        "tool_choice": {"type": "allowed_tools",
                        "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "prediction": {"type": "content", "content": "x"}, "chat_template_kwargs": {"x": 1},
        "speculation": {"method": "suffix", "draft_max": 2, "memory": True},
        "stream_options": {"include_usage": True}, "logit_bias": {"5": 1},
        "dry_sequence_breakers": ["x"], "reasoning_effort": "low", "thinking_budget_tokens": 4,
        **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repeat_penalty"), 0.5),
        **dict.fromkeys(("top_k", "repeat_last_n", "dry_allowed_length", "seed", "n", "n_cmpl"), 1),
        **dict.fromkeys(("mirostat", "min_tokens", "n_indent", "top_logprobs"), 0),
    },
    "/v1/completions": {"prompt": ["a", [5, "x"]], "logprobs": 1, "max_tokens": 1},
    "/completion": {"prompt": {"prompt_string": "a"}, "logit_bias": [[5, 1]],
                    "temperature": 0, "n_predict": 1},
    "/v1/responses": {
        "input": ITEMS, "tools": [SPACE, {"type": "custom", "name": "p",
                                          "format": {"definition": "x"}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "instructions": "i",
        "store": True, "previous_response_id": None, "background": False,
        "chat_template_kwargs": {"a": 1}, "n_cmpl": 1, "max_output_tokens": 1,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                     {"role": "assistant", "content": [
                         {"type": "thinking", "thinking": "t", "signature": "s"},
                         {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}}]},
                     {"role": "user", "content": BLOCKS}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 4}, "container": None, "mcp_servers": [],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "stop_sequences": ["q"], "chat_template_kwargs": {"a": 1}, "n_cmpl": 1, "max_tokens": 1,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": BLOCKS}]},
    "/v1/embeddings": {"input": ["a", [5]], "encoding_format": "float", "dimensions": 4},
    "/infill": {"input_prefix": "a", "input_extra": [{"text": "x", "filename": "y"}]},
    "/tokenize": {"content": "a", "with_pieces": True},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]},
}
# fmt: on
DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**70, -(2**70), 1.5, math.inf, math.nan, "", "x", "\0", "\ud800"),
    *([], [5], [None], ["x"], ["\ud800"], [[]], [{}], [2**70], DEEP),
    *({}, {"a": 1}, {"type": 5}, {"type": "x"}, {"name": 5}, {"function": 5}, {"a": math.nan}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a body has values, from its fields to what is deepest in them."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = at = copy.deepcopy(body)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


@pytest.fixture(scope="module")
def http(backend: LocalBackend, load: Callable[..., None]) -> Iterator[TestClient]:
    load(FAMILIES["an element for each argument"].template)
    with client_of(backend) as made:
        yield made


@pytest.mark.parametrize("path", BODIES)
def test_an_odd_value_is_taken_or_refused_in_the_form_of_the_api(
    http: TestClient, path: str
) -> None:
    body = BODIES[path]
    found = [*places(body)]
    n_values = len(ODD) if len(found) <= 8 else 2
    statuses = set()
    for number, more in product(range(len(found)), range(n_values)):
        each = replaced(body, found[number], ODD[(3 * number + more) % len(ODD)])
        answer = http.post(path, content=json.dumps(each))
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 501), (each, answer.text)
        if answer.status_code != 200:
            error = answer.json()
            assert error["error"]["message"] and ("type" in error) == ("messages" in path)
    assert 400 in statuses
    whole = http.post(path, content=json.dumps(body))
    assert whole.status_code == (501 if path == "/infill" else 200)
