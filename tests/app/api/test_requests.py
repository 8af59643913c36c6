"""What the engine is asked for by a body of each API, and what is refused, with field and reason.

``TAKEN`` and ``REFUSED`` are the tables; a row holds for all the addresses that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.requests import Tool, ToolChoice
from app.api.response_tools import Offered
from app.worker.events import Events
from app.worker.messages import Answer, ChatRequest, ModelFacts, Question, Status, Tokenize
from tests.support.fake_backend import MODEL, Recording, played
from tests.support.fake_endpoint import client

Body = dict[str, Any]
HI: Body = {"role": "user", "content": "hi"}
USUAL: dict[str, Body] = {
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "any", "max_tokens": 9, "messages": [HI]},
}
ALL = CHAT, TEXT, NATIVE, RESPONSES, MESSAGES = tuple(USUAL)
OPENAI, TALKS, BARE = (CHAT, TEXT, NATIVE), (CHAT, RESPONSES, MESSAGES), (TEXT, NATIVE)
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}}
HELD = {"sampling.json_schema": SCHEMA}
SPELLED: list[Body] = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "json_object", "schema": SCHEMA},
]
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
F = {"name": "f", "parameters": {}}
HEADER = "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=1a2b;"
BRIEF = {"messages": ({"role": "system", "content": "Be brief."}, HI)}
THINKS = {"template_kwargs": {"enable_thinking": True}}
OFF = -math.inf


@pytest.fixture(scope="module")
def backend() -> Recording:
    return Recording()


@pytest.fixture(scope="module")
def http(backend: Recording) -> Iterator[TestClient]:
    with client(backend, method="suffix:draft=3") as made:
        yield made


def told(request: ChatRequest, name: str) -> Any:
    """A field of a request, ``sampling.top_k``, or the names of its tools."""
    if name in ("names", "listed"):
        tools = request.tools if name == "names" else request.listed_tools
        return [tool["function"]["name"] for tool in tools]
    field, _, key = name.partition(".")
    value = getattr(request, field)
    return value.get(key) if key else value


def asked(http: TestClient, backend: Recording, path: str, body: Body) -> ChatRequest:
    """The request to the engine for a body."""
    answer = http.post(path, json={**USUAL[path], **body})
    assert answer.status_code == 200, (path, body, answer.text)
    return backend.requests.pop()


# fmt: off
TAKEN: list[tuple[tuple[str, ...], Body, Body]] = [
    # What every API can ask for
    (ALL, {}, {"parallel_tool_calls": True, "tools": (), "method": "suffix:draft=3", "memory": ""}),
    (ALL, {"seed": 5, "temperature": 0.5, "top_k": 7},
     {"sampling.seed": 5, "sampling.temperature": 0.5, "sampling.top_k": 7}),
    *[(ALL, {"speculation": given}, {"method": method, "memory": memory})
      for given, method, memory in (
          ({"method": "ar", "memory": False}, "ar", None),
          ({"method": "lookahead:window=5", "memory": False}, "lookahead:window=5", None),
          ({"method": "suffix", "draft": 2, "memory": False}, "suffix:draft=2", None),
          ({"memory": False}, "suffix:draft=3", None),  # the server's method
          ({"memory": True}, "suffix:draft=3", ""),
          ({"method": "ar"}, "ar", ""))],
    ((*OPENAI, RESPONSES), {"stop": ["END"]}, {"stop": ("END",)}),
    ((MESSAGES,), {"stop_sequences": ["END"]}, {"stop": ("END",)}),
    ((CHAT, TEXT, MESSAGES), {"max_tokens": 7}, {"max_tokens": 7}),
    ((RESPONSES,), {"max_output_tokens": 7}, {"max_tokens": 7}),
    *[((CHAT, NATIVE), {name: n}, {"max_tokens": limit})
      for name in ("max_tokens", "max_completion_tokens", "n_predict")
      for n, limit in ((7, 7), (0, 0), (-1, None))],
    # A schema, in all spellings
    *[((CHAT, TEXT), {"response_format": each}, {**HELD, "sampling.strict": False})
      for each in SPELLED],
    ((CHAT, TEXT), {"response_format": STRICT}, {**HELD, "sampling.strict": True}),
    (BARE, {"json_schema": SCHEMA}, HELD),
    ((CHAT,), {"response_format": {"type": "json_object"}},
     {"sampling.json_schema": {"type": "object"}}),
    ((CHAT,), {"response_format": {"type": "text"}}, {"sampling.json_schema": None}),
    ((RESPONSES,), {"text": {"format": FORMAT}}, HELD),
    ((MESSAGES,), {"output_config": {"format": FORMAT}}, HELD),
    ((MESSAGES,), {"output_format": FORMAT}, HELD),
    # Sampling in the terms of other servers
    (OPENAI, {"repeat_penalty": 1.3, "repeat_last_n": 9},
     {"sampling.repeat_penalty": 1.3, "sampling.penalty_last_n": 9}),
    ((CHAT,), {"samplers": ["top_k", "temperature"], "dry_multiplier": 1, "xtc_probability": 1},
     {"sampling.top_k": 40, "sampling.temperature": 0.8, "sampling.top_p": 1.0,
      "sampling.min_p": 0.0, "sampling.typical_p": 1.0, "sampling.dry_multiplier": 0.0,
      "sampling.xtc_probability": 0.0, "sampling.repeat_penalty": 1.0}),
    ((CHAT,), {"samplers": ["top_k", "top_p", "infill"], "top_p": 0.9, "n_indent": 4},
     {"sampling.top_p": 0.9, "sampling.min_p": 0.2, "sampling.temperature": 1.0, "n_indent": 4}),
    ((CHAT,), {"samplers": [], "temperature": 0}, {"sampling.temperature": 1.0}),
    ((CHAT,), {"min_tokens": 5, "temperature": -1},
     {"sampling.min_tokens": 5, "sampling.temperature": 0.0}),
    ((CHAT,), {"cache_prompt": False, "t_max_predict_ms": 1500},
     {"reuse": False, "predict_seconds": 1.5}),
    ((CHAT,), {"logit_bias": [[5, False], ["7", 1], [9, None], [11, -2.5]]},
     {"sampling.logit_bias": {5: OFF, 7: 1.0, 9: OFF, 11: -2.5}}),
    ((CHAT,), {"logit_bias": {"5": False, "7": 1}}, {"sampling.logit_bias": {5: OFF, 7: 1.0}}),
    # Values that change nothing
    ((NATIVE,), {"min_tokens": 0, "stop_token_ids": [], "top_n_sigma": -1, "adaptive_target": -1,
                 "lora": [], "grammar_lazy": False, "modalities": ["text"], "best_of": 1,
                 "repetition_penalty": 1.0, "reasoning_budget": -1, "functions": [], "audio": None,
                 "min_keep": 0, "dynatemp_range": 0.0, "image_data": [], "guided_json": None,
                 "logprobs": None, "unknown": [1], "user": "me"}, {}),
    # Tools
    ((CHAT,), {"tools": [NOW]}, {"tools": (NOW,), "tool_choice": "auto"}),
    *[((path,), body, {"tool_choice": "auto", "parallel_tool_calls": False, "names": ["f"]})
      for path, body in (
          (CHAT, {"tools": [{"type": "function", "function": F}], "parallel_tool_calls": False}),
          (RESPONSES, {"tools": [{"type": "function", **F}], "parallel_tool_calls": False}),
          (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}],
                      "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}))],
    *[((MESSAGES,), {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": given}},
       {"tool_choice": choice}) for given, choice in (("any", "required"), ("none", "none"))],
    ((RESPONSES,), {"tools": [{"type": "function", **F}, {"type": "function", "name": "g"},
                              {"type": "web_search"}], "n": 3, "n_cmpl": 3,
                    "tool_choice": {"type": "allowed_tools", "mode": "required",
                                    "tools": [{"name": "g"}]}},
     {"names": ["f", "g"], "tool_choice": {
         "type": "allowed_tools", "mode": "required",
         "tools": [{"type": "function", "function": {"name": "g"}}]}}),
    # Reasoning
    ((CHAT, RESPONSES), {}, {"thinking": None}),
    ((CHAT,), {"reasoning_effort": "high"}, {"template_kwargs": {"reasoning_effort": "high"}}),
    ((CHAT,), {"reasoning_effort": "none"}, {"template_kwargs": {}, "thinking": False}),
    ((RESPONSES,), {"reasoning": {"effort": "none"}}, {"thinking": False}),
    ((CHAT,), {"reasoning_effort": "low",
               "chat_template_kwargs": {"reasoning_effort": "x", "y": 1}},
     {"template_kwargs": {"reasoning_effort": "x", "y": 1}, "thinking": None}),
    *[((CHAT,), {"chat_template_kwargs": {name: value, "style": "false"}},
       {"template_kwargs": {name: value, "style": "false"}, "thinking": value})
      for name in ("enable_thinking", "thinking") for value in (True, False)],
    *[((CHAT,), {"enable_thinking": value}, {"thinking": value}) for value in (True, False)],
    ((CHAT,), {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"},
     {"thinking": True}),
    ((CHAT,), {"thinking_budget_tokens": 99}, {"thinking_budget": 99, "thinking": None}),
    ((CHAT,), {"thinking_budget_tokens": 0}, {"thinking_budget": 0, "thinking": False}),
    ((CHAT,), {"reasoning_budget_tokens": -1}, {"thinking_budget": None, "thinking": None}),
    ((MESSAGES,), {}, {"thinking": False, "tool_choice": "auto", "template_kwargs": {}}),
    ((MESSAGES,), {"thinking": {"type": "disabled"}}, {"thinking": False, "template_kwargs": {}}),
    ((MESSAGES,), {"thinking": {"type": "adaptive"}}, {"thinking": True, **THINKS}),
    ((MESSAGES,), {"thinking": {"type": "enabled", "budget_tokens": 1024}},
     {"thinking": True, "thinking_budget": 1024}),
    # A header that changes with each request is not in the prompt
    *[((MESSAGES,), {"system": system}, BRIEF) for system in (
        "Be brief.",
        f"{HEADER}\nBe brief.",
        [{"type": "text", "text": HEADER}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": f"{HEADER}\n\nBe brief."}])],
    ((MESSAGES,), {"system": HEADER}, {"messages": (HI,)}),
    # Whole conversations
    ((MESSAGES,), {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "ask", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "1", "name": "rain", "input": {"a": "é"}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "Go on."},
                {"type": "tool_result", "tool_use_id": "1", "content": [
                    {"type": "text", "text": "yes"},
                    {"type": "tool_reference", "tool_name": "sun"},
                    {"type": "search_result", "title": "x"}]}]}],
        "tools": [{"name": "rain", "description": "d", "input_schema": {"type": "object"}},
                  {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "rain", "disable_parallel_tool_use": True}},
     {"messages": (
         {"role": "system", "content": "Be brief."},
         {"role": "user", "content": "weather?"},
         {"role": "assistant", "content": "One moment.", "reasoning_content": "ask", "tool_calls": [
             {"id": "1", "type": "function", "function": {"name": "rain",
                                                          "arguments": {"a": "é"}}}]},
         {"role": "tool", "tool_call_id": "1",
          "content": "yes\nThe tool sun can be called.\n[search_result left out]"},
         {"role": "user", "content": "Go on."}),
      "names": ["rain"], "parallel_tool_calls": False,
      "tool_choice": {"type": "function", "function": {"name": "rain"}}}),
    ((RESPONSES,), {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "ask"}]},
        {"type": "message", "role": "assistant", "content": "One moment."},
        {"type": "function_call", "call_id": "1", "name": "rain", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "sun", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "1", "output": "yes"},
        {"type": "function_call_output", "call_id": "2", "output": [
            {"type": "input_text", "text": "no"}, {"type": "input_image", "image_url": "data:"}]},
        {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "o"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "user", "content": "Go on."}]},
     {"messages": (
         {"role": "user", "content": "weather?"},
         {"role": "assistant", "content": "One moment.", "reasoning_content": "ask", "tool_calls": [
             {"id": "1", "type": "function", "function": {"name": "rain", "arguments": "{}"}},
             {"id": "2", "type": "function", "function": {"name": "sun",
                                                          "arguments": '{"a":1}'}}]},
         {"role": "tool", "tool_call_id": "1", "content": "yes"},
         {"role": "tool", "tool_call_id": "2", "content": "no\n[image left out]"},
         {"role": "assistant", "content": "I cannot.", "reasoning_content": "o"},
         {"role": "user", "content": "Go on."})}),
]
SO = {"content": "b", "reasoning_content": "so"}
SAID: list[tuple[Body, Body]] = [
    ({"role": "assistant", "content": None}, {"content": ""}),
    ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, ""]},
     {"content": "No.\n\n"}),
    ({"role": "assistant", "content": "b", "reasoning_content": "so"}, SO),
    ({"role": "assistant", "content": "b", "reasoning": "so"}, SO),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": "so"},
                                       {"type": "text", "text": "b"}]}, SO),
    ({"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE, "a", {"text": ""}]},
     {"content": "what?\n[image left out]\na\n"}),
    ({"role": "tool", "tool_call_id": "1", "content": [IMAGE]},
     {"content": "[image left out]", "tool_call_id": "1"}),
    ({"role": "tool", "tool_call_id": "1", "content": {"a": [1]}},
     {"content": '{"a": [1]}', "tool_call_id": "1"}),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
     {"content": "", "tool_calls": [
         {"type": "function", "function": {"name": "now", "arguments": {}}}]}),
]
# By name the values that would change the text, and are not done.
UNDONE: dict[str, list[Any]] = {
    "stop_token_ids": [[2]], "structured_outputs": [{"choice": ["a"]}], "top_n_sigma": [1.5],
    "adaptive_target": [0.0], "min_keep": [3], "lora": [[{"id": 0, "scale": 1}]],
    "use_beam_search": [True], "chat_template": ["{{ messages }}"], "dynatemp_range": [1],
    "audio": [{"voice": "alloy", "format": "wav"}], "modalities": [["text", "audio"]],
    "image_data": [[{"data": "aGk=", "id": 1}]], "samplers": [["temperature", "top_k"], "kt"],
    "mirostat": [True], "best_of": [4], "guided_json": [{"const": 1}], "repetition_penalty": [1.3],
    "reasoning_budget": [0], "functions": [[{"name": "f"}]], "function_call": ["auto"],
    "max_tokens": [-2], "top_p": [2], "top_k": [[1]], "seed": ["x"], "temperature": ["warm"],
    "n": [0, "x"], "stop": [["x"] * 5000, [1]], "dry_sequence_breakers": [["x"] * 5000],
    "response_format": [{"type": "json_schema"}],
    "logit_bias": [{"1": "high"}, [[5, True]], [[5, [1]]], [[5, 10**400]], [[5.5, 1]], [[None, 1]],
                   [[5]], [[n, 1] for n in range(5000)]],
}
UNSURE: list[Any] = ["false", "true", 0, 1, [], "low"]
CHOICES: list[Any] = ["required", "any", {"type": "function", "function": {"name": "f"}}]
# Addresses, body, the field that is named, and a part of the reason.
REFUSED: list[tuple[tuple[str, ...], Body, str | None, str]] = [
    *[((CHAT, NATIVE), {name: value}, name, name) for name in UNDONE for value in UNDONE[name]],
    *[((CHAT,), {"tool_choice": choice}, "tool_choice", "tool_choice") for choice in CHOICES],
    *[((CHAT,), {"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}", "")
      for name in ("enable_thinking", "thinking") for value in UNSURE],
    ((CHAT,), {"enable_thinking": "false"}, "enable_thinking", ""),
    *[((CHAT,), {"response_format": each, "grammar": "root ::= [a-z]"}, "grammar", "")
      for each in (*SPELLED, STRICT)],
    ((CHAT,), {"messages": []}, "messages", "messages: List should have at least 1 item"),
    ((CHAT,), {"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role",
     "messages[0].role: Input should be"),
    *[((CHAT,), {"messages": [HI, {"role": "user", "content": [part]}]}, None,
       f"type '{part['type']}' is not supported")
      for part in (IMAGE, {"type": "file", "file": {}})],
    ((CHAT,), {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None,
     "messages[0].content[0]: "),
    ((CHAT,), {"messages": [{"role": "user", "content": [
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}, HI]}, None,
     "type 'input_audio' is not supported"),
    (BARE, {"prompt": ["a"] * 600}, "prompt", "the body asks for 600 texts; ask for at most 512"),
    ((TEXT,), {"suffix": "b"}, None, "has no token for prefix, suffix, middle: it was not"),
    *[((RESPONSES,), body, None, reason) for body, reason in (
        ({"background": True}, "background is not supported: stream the response"),
        ({"conversation": "conv_1"}, "conversation is not supported: give previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"tool_choice": {"type": "web_search"}},
         "tools of the type 'web_search' do not run here"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "names 'f', which is not among"),
        ({"tool_choice": "required"}, "'required', but the request has no tools that run here"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]},
         "no tools that run here"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: Input should be"),
        ({"input": [{"type": "computer_call"}]}, "(got 'computer_call'"),
        ({"input": [{"content": "x"}]}, "message needs a role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "a part of type 'input_file' is not supported"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"top_k": "many"}, "top_k"))],
    ((MESSAGES,), {"container": "c"}, None, "container is not supported: no code runs here"),
    ((MESSAGES,), {"messages": []}, None, "messages"),
    ((MESSAGES,), {"max_tokens": 0}, None, "max_tokens"),
    ((MESSAGES,), {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, None,
     "a part of type 'video' is not supported"),
]
# fmt: on


@pytest.mark.parametrize(("paths", "body", "expected"), TAKEN)
def test_a_body_asks_the_engine_for_the_same_in_every_api(
    http: TestClient, backend: Recording, paths: tuple[str, ...], body: Body, expected: Body
) -> None:
    for path in paths:
        request = asked(http, backend, path, body)
        assert {name: told(request, name) for name in expected} == expected, path


@pytest.mark.parametrize(("message", "expected"), SAID)
def test_messages_are_taken_as_clients_send_them(
    http: TestClient, backend: Recording, message: Body, expected: Body
) -> None:
    request = asked(http, backend, CHAT, {"messages": [HI, message, HI]})
    assert request.messages[1] == {"role": message["role"], **expected}


@pytest.mark.parametrize(("paths", "body", "field", "reason"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(
    http: TestClient, paths: tuple[str, ...], body: Body, field: str | None, reason: str
) -> None:
    for path in paths:
        answer = http.post(path, json={**USUAL[path], **body})
        assert answer.status_code == 400, answer.text
        assert path != MESSAGES or answer.json()["type"] == "error"
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and reason in error["message"]
        assert field is None or (error["param"] + "[").startswith((f"{field}[", f"{field}."))


def test_a_deferred_tool_is_defined_where_a_search_finds_it(
    http: TestClient, backend: Recording
) -> None:
    def request(tools: Any, messages: Any) -> ChatRequest:
        return asked(http, backend, MESSAGES, {"tools": tools, "messages": messages})

    schema = {"type": "object", "properties": {"é": {}}}
    search: Body = {"name": "Search", "input_schema": {}}
    write: Body = {"name": "Write", "input_schema": {}}
    late = {"input_schema": schema, "description": "d", "defer_loading": True}
    fetch, other = ({"name": name, **late} for name in ("Fetch", "Other"))
    here = {"role": "system", "content": [{"type": "text", "text": "# Environment\nLinux"}]}
    first = request([search, other, write], [HI, here, {"role": "system", "content": []}])
    assert told(first, "names") == ["Search", "Write"]

    found = [{"type": "tool_reference", "tool_name": name} for name in ("Fetch", "Write", "Gone")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    made = {"type": "tool_use", "id": "1", "name": "Search", "input": {}}
    answer = {"role": "user", "content": [result, {"type": "text", "text": "Tool loaded."}]}
    here["content"] = "# Environment\nLinux"
    after = [HI, here, {"role": "assistant", "content": [made]}, answer]
    second = request([search, fetch, other, write], after)
    assert told(second, "names") == ["Search", "Fetch", "Write"]
    assert second.messages[3]["content"] == (
        '<function>{"name":"Fetch","description":"d","parameters":'
        '{"type":"object","properties":{"é":{}}}}</function>\n'
        "The tool Write can be called.\nThe tool Gone can be called."
    )
    assert second.listed_tools == first.listed_tools == first.tools
    assert second.messages[:2] == first.messages

    elsewhere = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert told(request([elsewhere, fetch, write], [HI]), "listed") == ["Fetch", "Write"]


def test_names_of_tools_in_namespaces_are_short_and_no_two_are_equal() -> None:
    def space(name: str, *tools: str) -> Body:
        return {"type": "namespace", "name": name, "tools": [{"name": tool} for tool in tools]}

    spaces = [space("a" * 40, "b" * 40, "c" * 40), space("a__b", "c"), space("a", *["b__c"] * 2)]
    offered = Offered(Tool.model_validate(tool) for tool in [*spaces, {"name": "a__b__c"}])
    names = [tool.name for tool in offered.functions]
    assert len(names) == len(set(names)) == 5 and max(map(len, names)) == 64
    pairs = [("a" * 40, "c" * 40), ("a__b", "c"), ("a", "b__c"), ("", "a__b__c")]
    for namespace, name in pairs:
        call = offered.call(offered.name(namespace, name))
        assert (call.get("namespace", ""), call["name"]) == (namespace, name)
        choice = ToolChoice(name=name, namespace=namespace)
        assert offered.choice(choice) == ToolChoice(name=offered.name(namespace, name))


def test_a_body_is_read_whatever_its_header_says_and_a_wrong_one_gets_the_reason(
    http: TestClient, backend: Recording
) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for given, read in (
        (b"hi", "hi"),
        (rb"\ud83d\uDE00 \\ud83d \\\\uD83D", "\U0001f600 \\ud83d \\\\uD83D"),  # whole characters
        (rb"\ud83d\ud83d\ude00\ude00 \\\udbff!", "\ufffd\U0001f600\ufffd \\\ufffd!"),  # and halves
    ):
        body = b'{"messages": [{"role": "user", "content": "%b"}]}' % given
        answer = http.post("http://127.0.0.1//v1/chat/completions/", content=body, headers=form)
        assert answer.status_code == 200
        assert backend.requests.pop().messages[0]["content"] == read
    for content, reason, param in (
        (b'{"messages": [}', "the body is not JSON: Expecting value at character 14", None),
        (b"", "the body: Field required", None),
        (rb'{"prompt": "a", "tool_choice": {"\udc00": 1}}', "messages", "messages"),
        (b"[1]", "the body: ", None),
        (b'{"messages": [], "stop": [1]}', "messages", "messages"),
    ):
        answer = http.post(CHAT, content=content, headers=form)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert reason in error["message"]


class Sized(Recording):
    """A model whose longest token has ten bytes."""

    n_ctx = 2**20

    def status(self) -> Status:
        facts = ModelFacts(n_vocab=100, longest=10, fim={"prefix": 1, "suffix": 2, "middle": 3})
        return Status(replace(MODEL, n_ctx=self.n_ctx), facts=facts)

    def ask(self, question: Question) -> Events:
        assert isinstance(question, Tokenize)
        return played([Answer(tokens=tuple((1, b"x") for _ in question.text))])


# fmt: off
SIZES: list[tuple[str, Callable[[int], Body], int, str]] = [
    (CHAT, lambda n: {"messages": [HI] * n}, 2**14, "messages: List .*at most 16384"),
    (CHAT, lambda n: {"stop": ["x"] * n}, 128, "stop: List .*at most 128 items"),
    (CHAT, lambda n: {"stop": "x" * n}, 500, r"stop\[0\]: String .*at most 500 characters"),
    (NATIVE, lambda n: {"dry_sequence_breakers": ["x"] * n}, 16, "breakers has 17 .*at most 16"),
    (NATIVE, lambda n: {"logit_bias": {str(i): 1 for i in range(n)}}, 1024, "bias.*most 1024 it"),
    (NATIVE, lambda n: {"logit_bias": [["x" * n, 1]]}, 500, "a text of 501 characters; .*500"),
    (NATIVE, lambda n: {"logit_bias": [[1, 2]] * n}, 1024, "bias.*at most 1024 items"),
    (NATIVE, lambda n: {"prompt": ["x"] * n}, 512, "asks for 513 texts; ask for at most 512"),
    (NATIVE, lambda n: {"prompt": ["x"] * 8, "n": n}, 64, "n: Input .*less than or equal"),
    (NATIVE, lambda n: {"prompt": ["x"] * 16, "n": n}, 32, "528 texts; ask for at most 512"),
    (NATIVE, lambda n: {"prompt": "x" * 10 * n}, 2048, "at least 2049 tokens, .*2048; shorten"),
    (CHAT, lambda n: {"messages": [{**HI, "content": ""}] * n}, 2048, "at least 2049 tokens"),
    (NATIVE, lambda n: {"prompt": [7] * n}, 2048, "at least 2049 tokens, .*2048; shorten it$"),
    (CHAT, lambda n: {"prediction": {"content": "x" * 10 * n}}, 2048, "at least 2049 tokens"),
    (CHAT, lambda n: {"messages": [{**HI, "content": "x" * (10 * n - 4)}]}, 2048,
     "at least 2049 tokens, .*2048"),
    (CHAT, lambda n: {"messages": [{**HI, "content": [{"type": "text", "text": ""}] * n}]}, 1024,
     "a message has 1025 parts; give at most 1024"),
    ("/infill", lambda n: {"input_extra": [{"text": ""}] * n}, 256, "extra.*at most 256"),
    ("/tokenize", lambda n: {"content": "x" * n}, 2**20, "content: String .*1048576"),
    ("/tokenize", lambda n: {"content": "x" * n, "with_pieces": True}, 2**18,
     "with_pieces takes at most 262144 characters"),
]
# fmt: on


@pytest.mark.parametrize(("path", "given", "most", "reason"), SIZES)
def test_what_is_too_much_is_refused_with_the_limit_before_any_work(
    path: str, given: Callable[[int], Body], most: int, reason: str
) -> None:
    backend = Sized()
    backend.n_ctx = 2048 if most == 2048 else 2**20
    with client(backend) as http:
        body = {"messages": [HI], "prompt": "hi", "input_prefix": "x"}
        assert http.post(path, json={**body, **given(most)}).status_code == 200
        n_before = len(backend.requests)
        refused = http.post(path, json={**body, **given(most + 1)})
        assert refused.status_code == 400
        assert re.search(reason, refused.json()["error"]["message"])
        assert len(backend.requests) == n_before


def test_a_body_of_millions_of_values_is_not_read() -> None:
    with client(Sized()) as http:
        for item in ("[]", "{}", "1", '"a"'):
            body = f'{{"prompt": [{",".join([item] * 1_310_720)}]}}'
            refused = http.post(NATIVE, content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 413
            assert "commas and brackets; send at most 1,310,720" in refused.text
        assert http.post(NATIVE, json={"prompt": "a,[{" * 100_000}).status_code == 200
