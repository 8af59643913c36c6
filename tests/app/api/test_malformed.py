"""Bodies with one odd value, at every place of every API: refused with a reason, never an error of
the server's own."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.service import Service
from app.server import endpoint, guard
from app.worker.messages import Loaded, ModelSpec
from tests.speculation.chat.tool_templates import FAMILIES
from tests.support.local_backend import LocalBackend

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
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
            {"role": "user", "content": "b"},
        ],
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [NAMED]},
        },
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "prediction": {"type": "content", "content": "x"},
        "speculation": {"method": "suffix", "draft_max": 2, "memory": True},
        "chat_template_kwargs": {"x": 1},
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1},
        "dry_sequence_breakers": ["x"],
        **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repeat_penalty"), 0.5),
        **dict.fromkeys(("top_k", "repeat_last_n", "dry_allowed_length", "seed", "n", "n_cmpl"), 1),
        **dict.fromkeys(("mirostat", "min_tokens", "n_indent", "top_logprobs"), 0),
        "model": "m",
        "samplers": ["top_k"],
        "stop": ["q"],
        "reasoning_effort": "low",
        "thinking_budget_tokens": 4,
        "max_tokens": 1,
    },
    "/v1/completions": {"prompt": ["a", [5, "x"]], "logprobs": 1, "max_tokens": 1},
    "/completion": {
        "prompt": {"prompt_string": "a"},
        "logit_bias": [[5, 1]],
        "temperature": 0,
        "n_predict": 1,
    },
    "/v1/responses": {
        "input": ITEMS,
        "tools": [SPACE, {"type": "custom", "name": "p", "format": {"definition": "x"}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "instructions": "i",
        "store": True,
        "previous_response_id": None,
        "background": False,
        "chat_template_kwargs": {"a": 1},
        "n_cmpl": 1,
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}},
                ],
            },
            {"role": "user", "content": BLOCKS},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 4},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "container": None,
        "mcp_servers": [],
        "stop_sequences": ["q"],
        "chat_template_kwargs": {"a": 1},
        "n_cmpl": 1,
        "max_tokens": 1,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": BLOCKS}]},
    "/v1/embeddings": {"input": ["a", [5]], "encoding_format": "float", "dimensions": 4},
    "/infill": {"input_prefix": "a", "input_extra": [{"text": "x", "filename": "y"}]},
    "/tokenize": {"content": "a", "with_pieces": True},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]},
}
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
def http(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    template = tmp_path_factory.mktemp("malformed") / "template.jinja"
    template.write_text(FAMILIES["an element for each argument"].template)
    backend = LocalBackend()
    spec = ModelSpec(str(tiny_model), n_threads=1, parallel=1, chat_template=str(template))
    assert isinstance(list(backend.load(spec))[-1], Loaded)
    app = guard(endpoint(Service(backend)), "127.0.0.1")
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made
    backend.close()


@pytest.mark.parametrize("path", BODIES)
def test_an_odd_value_is_taken_or_refused_in_the_form_of_the_api(
    http: TestClient, path: str
) -> None:
    body = BODIES[path]
    found = [*places(body)]
    n_values = len(ODD) if len(found) <= 8 else 2
    asked = [
        replaced(body, place, ODD[(3 * number + more) % len(ODD)])
        for number, place in enumerate(found)
        for more in range(n_values)
    ]
    statuses = set()
    for each in asked:
        answer = http.post(path, content=json.dumps(each))
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 501), (each, answer.text)
        if answer.status_code != 200:
            error = answer.json()
            assert error["error"]["message"] and ("type" in error) == ("messages" in path)
    assert 400 in statuses
    whole = http.post(path, content=json.dumps(body))
    assert whole.status_code == (501 if path == "/infill" else 200)
