"""A request's fields: used, refused by name, or taken as other programs spell them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.service import Service
from app.server import endpoint, guard
from tests.support.fake_backend import Recording

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}}


@pytest.fixture(scope="module")
def backend() -> Recording:
    return Recording()


@pytest.fixture(scope="module")
def http(backend: Recording) -> Iterator[TestClient]:
    service = Service(backend, method="suffix:draft=3")
    with TestClient(guard(endpoint(service), "127.0.0.1"), base_url="http://127.0.0.1") as made:
        yield made


def sent(
    http: TestClient, backend: Recording, path: str = "/v1/chat/completions", **asked: Any
) -> Any:
    """The request to the engine for what was asked."""
    prompt = HELLO if "chat" in path else {"prompt": "hi"}
    answer = http.post(path, json={**prompt, **asked})
    assert answer.status_code == 200, answer.text
    return backend.requests.pop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [2]),
        ("structured_outputs", {"choice": ["a"]}),
        ("top_n_sigma", 1.5),
        ("adaptive_target", 0.0),
        ("min_keep", 3),
        ("lora", [{"id": 0, "scale": 1}]),
        ("use_beam_search", True),
        ("chat_template", "{{ messages }}"),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("image_data", [{"data": "aGk=", "id": 1}]),
        ("samplers", ["temperature", "top_k"]),
        ("samplers", "kt"),
        ("best_of", 4),
        ("guided_json", {"const": 1}),
        ("repetition_penalty", 1.3),
        ("reasoning_budget", 0),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("max_tokens", -2),
        ("top_p", 2),
        ("top_k", [1]),
        ("seed", "x"),
        ("temperature", "warm"),
        ("n", 0),
        ("logit_bias", {"1": "high"}),
        ("logit_bias", [[5, True]]),
        ("logit_bias", [[5, [1]]]),
        ("logit_bias", [[5, 10**400]]),
        ("logit_bias", [[5.5, 1]]),
        ("logit_bias", [[None, 1]]),
        ("logit_bias", [[5]]),
        ("logit_bias", [[n, 1] for n in range(5000)]),
        ("stop", ["x"] * 5000),
        ("dry_sequence_breakers", ["x"] * 5000),
        ("response_format", {"type": "json_schema"}),
        ("tool_choice", "required"),
        ("tool_choice", "any"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_what_would_change_the_text_and_is_not_done_is_refused_by_name(
    http: TestClient, name: str, value: Any
) -> None:
    for path, prompt in (("/v1/chat/completions", HELLO), ("/completion", {"prompt": "hi"})):
        if name == "tool_choice" and "chat" not in path:
            continue
        answer = http.post(path, json={**prompt, name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"].partition("[")[0].partition(".")[0] == name
        assert name in error["message"]


def test_values_that_change_nothing_are_taken(http: TestClient, backend: Recording) -> None:
    sent(
        http,
        backend,
        "/completion",
        min_tokens=0,
        stop_token_ids=[],
        top_n_sigma=-1,
        adaptive_target=-1,
        lora=[],
        grammar_lazy=False,
        modalities=["text"],
        best_of=1,
        repetition_penalty=1.0,
        reasoning_budget=-1,
        functions=[],
        audio=None,
        min_keep=0,
        dynatemp_range=0.0,
        image_data=[],
        guided_json=None,
        logprobs=None,
        unknown=[1],
        user="me",
    )


@pytest.mark.parametrize(
    "spelled",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_a_schema_is_found_in_all_spellings(
    http: TestClient, backend: Recording, spelled: dict[str, Any]
) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        request = sent(http, backend, path, response_format=spelled)
        assert request.sampling["json_schema"] == SCHEMA
        assert request.sampling.get("strict", False) is ("strict" in str(spelled))
    plain = sent(http, backend, response_format={"type": "json_object"})
    assert plain.sampling["json_schema"] == {"type": "object"}
    assert "json_schema" not in sent(http, backend, response_format={"type": "text"}).sampling
    both = {**HELLO, "response_format": spelled, "grammar": "root ::= [a-z]"}
    assert http.post("/v1/chat/completions", json=both).json()["error"]["param"] == "grammar"


def test_thinking_is_turned_on_and_off_by_booleans_alone(
    http: TestClient, backend: Recording
) -> None:
    for name in ("enable_thinking", "thinking"):
        wrong: list[Any] = ["false", "true", 0, 1, [], "low"]
        for value in wrong:
            body = {**HELLO, "chat_template_kwargs": {name: value}}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"
        for value in (True, False):
            request = sent(http, backend, chat_template_kwargs={name: value, "style": "false"})
            assert request.template_kwargs == {name: value, "style": "false"}
    assert sent(http, backend, enable_thinking=False).thinking is False
    assert sent(http, backend, enable_thinking=True).thinking is True
    assert sent(http, backend).thinking is None
    answer = http.post("/v1/chat/completions", json={**HELLO, "enable_thinking": "false"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "enable_thinking")


def test_no_memory_can_be_wanted_with_any_method(http: TestClient, backend: Recording) -> None:
    for given, method, memory in (
        ({"method": "ar", "memory": False}, "ar", None),
        ({"method": "lookahead:window=5", "memory": False}, "lookahead:window=5", None),
        ({"method": "suffix", "draft": 2, "memory": False}, "suffix:draft=2", None),
        ({"memory": False}, "suffix:draft=3", None),  # the server's method
        ({"memory": True}, "suffix:draft=3", ""),
        ({"method": "ar"}, "ar", ""),
    ):
        for path in ("/v1/chat/completions", "/completion"):
            request = sent(http, backend, path, speculation=given)
            assert (request.method, request.memory) == (method, memory)


def test_fields_of_other_servers_are_put_into_our_terms(
    http: TestClient, backend: Recording
) -> None:
    sampling = sent(http, backend, repeat_penalty=1.3, repeat_last_n=9).sampling
    assert (sampling["repeat_penalty"], sampling["penalty_last_n"]) == (1.3, 9)
    asked: dict[str, Any] = {"samplers": ["top_k", "temperature"], "dry_multiplier": 1}
    sampling = sent(http, backend, **asked, xtc_probability=1).sampling
    assert (sampling["top_k"], sampling["temperature"]) == (40, 0.8)
    assert (sampling["top_p"], sampling["min_p"], sampling["typical_p"]) == (1.0, 0.0, 1.0)
    assert (sampling["dry_multiplier"], sampling["xtc_probability"]) == (0.0, 0.0)
    assert sampling["repeat_penalty"] == 1.0
    vim = sent(http, backend, samplers=["top_k", "top_p", "infill"], top_p=0.9, n_indent=4)
    assert [vim.sampling[name] for name in ("top_p", "min_p", "temperature")] == [0.9, 0.2, 1.0]
    assert vim.n_indent == 4
    assert sent(http, backend, samplers=[], temperature=0).sampling["temperature"] == 1.0
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        for n, limit in ((7, 7), (0, 0), (-1, None)):
            limited: dict[str, Any] = {name: n}
            assert sent(http, backend, **limited).max_tokens == limit
    assert sent(http, backend, min_tokens=5).sampling["min_tokens"] == 5
    assert sent(http, backend, temperature=-1).sampling["temperature"] == 0.0
    request = sent(http, backend, cache_prompt=False, t_max_predict_ms=1500)
    assert (request.reuse, request.predict_seconds) == (False, 1.5)
    biases = [[5, False], ["7", 1], [9, None], [11, -2.5]]
    bias = sent(http, backend, logit_bias=biases).sampling["logit_bias"]
    assert bias == {5: -math.inf, 7: 1.0, 9: -math.inf, 11: -2.5}
    given = {"5": False, "7": 1}
    assert sent(http, backend, logit_bias=given).sampling["logit_bias"] == {5: -math.inf, 7: 1.0}


def test_a_body_is_read_whatever_its_header_says_and_a_wrong_one_gets_the_reason(
    http: TestClient, backend: Recording
) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    url = "http://127.0.0.1//v1/chat/completions/"
    for given, read in (
        (b"hi", "hi"),
        (rb"\ud83d\uDE00 \\ud83d \\\\uD83D", "\U0001f600 \\ud83d \\\\uD83D"),  # whole characters
        (rb"\ud83d\ud83d\ude00\ude00 \\\udbff!", "\ufffd\U0001f600\ufffd \\\ufffd!"),  # and halves
    ):
        sent = body.replace(b"hi", given)
        assert http.post(url, content=sent, headers=form).status_code == 200
        assert backend.requests[-1].messages[0]["content"] == read
    for content, reason, param in (
        (b'{"messages": [}', "the body is not JSON: Expecting value at character 14", None),
        (b"", "the body: Field required", None),
        (rb'{"prompt": "a", "tool_choice": {"\udc00": 1}}', "messages", "messages"),
        (b"[1]", "the body: ", None),
        (b'{"messages": [{"role": "judge", "content": "x"}]}', "role", "messages[0].role"),
        (b'{"messages": [], "stop": [1]}', "messages", "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}', "stop", "stop[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": "x"}', "n: ", "n"),
    ):
        answer = http.post("/v1/chat/completions", content=content, headers=form)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert reason in error["message"]
    many = http.post("/v1/completions", json={"prompt": ["a"] * 600}).json()["error"]
    assert (many["param"], many["message"]) == (
        "prompt",
        "the body asks for 600 texts; ask for at most 512",
    )
    gap = http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert gap.status_code == 400
    assert "has no token for prefix, suffix, middle: it was not" in gap.json()["error"]["message"]
