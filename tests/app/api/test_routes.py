"""The newer routes with a real model: tools, schemas, vectors, gaps, and models by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from openai.types.responses import Response as OpenAIResponse
from pydantic import BaseModel

from app.api.infill import fitted
from tests.app.api.test_endpoint import TEMPLATE, WEATHER, wait_for_model
from tests.app.browser.chat import free_port, started
from tests.support.tiny_gguf import write_tiny_gguf

HELLO: Any = [{"role": "user", "content": "a cat saw the dog"}]
RAIN: dict[str, Any] = WEATHER["function"]  # type: ignore[assignment]


def add_fim(writer: Any) -> None:
    for name, token in (("pre", 259), ("suf", 260), ("mid", 261)):  # <|system|>, <|user|>, …
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    model = write_tiny_gguf(path, n_ctx=8192, chat_template=TEMPLATE, more=add_fim)
    flags = ["--no-page", "--model", str(model), "--ctx", "8192", "--threads", "1"]
    with started("app", *flags, "--port", free_port(), "--alias", "tiny") as (url, _):
        wait_for_model(url)
        yield url[: -len("/v1")]


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def anthropic(address: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=address, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as made:
        yield made


def fits(arguments: Any) -> bool:
    return arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2, 3)


def first_call(ask: Callable[[int], Any]) -> tuple[int, Any]:
    """The first seed with which a reply begins with a call, and that reply: the model is random,
    and may begin with a thought that never ends."""
    replies = ((seed, ask(seed)) for seed in range(20))
    return next((seed, one) for seed, one in replies if is_call(one))


def is_call(reply: Any) -> bool:
    first = reply.output[0] if isinstance(reply, OpenAIResponse) else reply.content[0]
    return first.type in ("function_call", "tool_use")


def test_a_response_calls_a_tool_and_takes_its_result(client: OpenAI) -> None:
    tool: Any = {"type": "function", **RAIN}
    asked: dict[str, Any] = {"model": "any", "input": "a cat", "tools": [tool]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 300}
    seed, whole = first_call(
        lambda seed: client.responses.create(**asked, extra_body={"seed": seed})
    )
    asked["extra_body"] = {"seed": seed}
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "weather"
    assert fits(json.loads(call.arguments)) and whole.status == "completed"
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(e.delta for e in events if "delta" in e.type) == call.arguments
    after = client.responses.create(
        model="any",
        previous_response_id=whole.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        tools=[tool],
        tool_choice="none",
        max_output_tokens=4,
    )
    assert after.usage is not None and after.usage.input_tokens_details.cached_tokens > 0
    assert [item.type for item in after.output] == ["message"]


class Forecast(BaseModel):
    city: Literal["Oslo", "Rome"]
    rain: bool


def test_a_response_fits_its_schema(client: OpenAI) -> None:
    found = client.responses.parse(model="any", input="a cat", text_format=Forecast)
    assert found.output_parsed is not None
    assert found.output_parsed.city in ("Oslo", "Rome")
    counted = client.responses.input_tokens.count(model="any", input="a cat")
    assert found.usage is not None and counted.input_tokens == found.usage.input_tokens


def test_a_message_uses_a_tool_and_takes_its_result(anthropic: Anthropic) -> None:
    tool: Any = {
        "name": RAIN["name"],
        "description": RAIN["description"],
        "input_schema": RAIN["parameters"],
    }
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"model": "any", "max_tokens": 300, "messages": HELLO, "tools": [tool]}
    seed, whole = first_call(
        lambda seed: anthropic.messages.create(
            **asked, tool_choice=choice, extra_body={"seed": seed}
        )
    )
    asked["extra_body"] = {"seed": seed}
    (call,) = whole.content
    assert call.type == "tool_use" and call.name == "weather" and fits(call.input)
    assert whole.stop_reason == "tool_use"
    parts = [
        event.delta.partial_json
        for event in anthropic.messages.create(**asked, tool_choice=choice, stream=True)
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert json.loads("".join(parts)) == call.input
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    after: dict[str, Any] = {"model": "any", "messages": messages, "tools": [tool]}
    counted = anthropic.messages.count_tokens(**after)
    found = anthropic.messages.create(**after, max_tokens=3, tool_choice={"type": "none"})
    assert found.usage.output_tokens <= 3
    assert counted.input_tokens > whole.usage.input_tokens
    plain = {"model": "any", "messages": HELLO}
    n_tokens = anthropic.messages.count_tokens(**plain).input_tokens
    reply = anthropic.messages.create(**plain, max_tokens=1).usage
    assert n_tokens == reply.input_tokens + (reply.cache_read_input_tokens or 0)

    late = {"name": "late", "description": "d", "input_schema": {}, "defer_loading": True}
    late_choice: Any = {"type": "tool", "name": "late"}
    result["content"] = [{"type": "tool_reference", "tool_name": "late"}]
    after |= {"tools": [late, tool]}
    found = anthropic.messages.create(**after, max_tokens=1, tool_choice=late_choice)
    n_tokens = found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    definition = '<function>{"name":"late","description":"d","parameters":{}}</function>'
    result["content"] = definition
    assert n_tokens == anthropic.messages.count_tokens(**after).input_tokens
    after |= {"tools": [tool]}
    assert n_tokens == anthropic.messages.count_tokens(**after).input_tokens


def test_vectors_come_as_floats_or_base64_and_for_each_input(
    client: OpenAI, http: httpx.Client
) -> None:
    texts = ["the cat", "a dog saw", "the cat"]
    found = client.embeddings.create(model="any", input=texts)  # base64 within
    asked = {"input": texts, "encoding_format": "float"}
    floats = http.post("/v1/embeddings", json=asked).json()
    vectors = np.array([one["embedding"] for one in floats["data"]])
    assert np.allclose([one.embedding for one in found.data], vectors, atol=1e-7)
    assert vectors.shape == (3, 32) and [one["index"] for one in floats["data"]] == [0, 1, 2]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.allclose(vectors[0], vectors[2]) and not np.allclose(vectors[0], vectors[1])
    content = {"content": "the cat", "add_special": True}
    tokens = http.post("/tokenize", json=content).json()["tokens"]
    by_ids = client.embeddings.create(model="any", input=tokens)
    assert np.allclose(by_ids.data[0].embedding, vectors[0], atol=1e-7)
    assert by_ids.usage.prompt_tokens == by_ids.usage.total_tokens == len(tokens)
    short = client.embeddings.create(model="any", input=[tokens, tokens], dimensions=8).data
    expected = vectors[0][:8] / np.linalg.norm(vectors[0][:8])
    assert np.allclose([one.embedding for one in short], [expected] * 2, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"input": []}, "input has 0 texts; give 1 to 2048"),
        ({"input": ["a"] * 2049}, "input has 2049 texts"),
        ({"dimensions": 33}, "dimensions is 33; this model's vectors have 32"),
        ({"dimensions": 0}, "dimensions"),
        ({"input": "a" * 9000}, "text 0 has 9001 tokens, and the model reads 8192 at most"),
        ({"input": ["a", [5, 10**6]]}, "text 1 has token 1000000; this model has 0 to"),
        ({"input": [1, "a"]}, "an input has texts and token ids"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_inputs_without_a_vector_are_refused(
    client: OpenAI, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequestError, match=reason):
        client.embeddings.create(model="any", input="a", extra_body=more)


def test_a_gap_is_filled_between_prefix_and_suffix(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"input_prefix": "the cat", "input_suffix": "a dog", "prompt": "saw"}
    found = http.post("/infill", json={**asked, "n_predict": 3, "temperature": 0}).json()
    gap = "<s><|system|>the catsaw<|user|>a dog<|assistant|>"
    assert (found["prompt"], found["tokens_predicted"]) == (gap, 3)
    extra = [{"filename": "b", "text": "th"}, {"text": "he"}]
    whole = http.post("/infill", json={**asked, "n_predict": 1, "input_extra": extra}).json()
    begin = "<s>" + "\n\nb\nth" + "\n\nsnippet\nhe"
    assert whole["prompt"] == begin + gap.removeprefix("<s>")
    wrong: dict[str, Any]
    for wrong in ({"input_extra": [{"filename": "ok"}]}, {"input_extra": [{}]}, {"prompt": 5}):
        assert http.post("/infill", json={**asked, **wrong}).status_code == 400
    filled = http.post("/infill", json={**asked, "prompt": "", "n_predict": 3, "temperature": 0})
    before: dict[str, Any] = {"prompt": ["the cat"] * 2, "suffix": "a dog"}
    before |= {"max_tokens": 3, "temperature": 0}
    both = http.post("/v1/completions", json=before).json()
    assert [one["text"] for one in both["choices"]] == [filled.json()["content"]] * 2
    assert both["usage"]["prompt_tokens"] == 2 * filled.json()["tokens_evaluated"]
    for path, wrong in (
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/completions", {"echo": True}),
        ("/completion", {}),
    ):
        refused = http.post(path, json={**before, **wrong})
        assert refused.status_code == 400 and "suffix" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("room", "n_prefix", "n_suffix", "n_extra"),
    [(100, 10, 10, 10), (30, 10, 10, 5), (25, 10, 10, 0), (17, 9, 3, 0), (4, 0, 0, 0)],
)
def test_what_is_nearest_to_a_gap_is_kept(
    room: int, n_prefix: int, n_suffix: int, n_extra: int
) -> None:
    marks = {"prefix": -1, "suffix": -2, "middle": -3}
    prefix, suffix, extra = range(100, 110), range(200, 210), range(300, 310)
    found = fitted(marks, [1], extra, prefix, [7], suffix, room)
    assert found == [
        *(1, *extra[10 - n_extra :]),
        *(-1, *prefix[10 - n_prefix :], 7),
        *(-2, *suffix[:n_suffix], -3),
    ]


def test_a_request_loads_the_model_that_it_names_and_an_idle_one_is_freed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, name = tmp_path / "models--me--tiny", "hf:me/tiny/folder/other.gguf"
    for folder in ("snapshots/1234/folder", "refs"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("1234")
    for file in ("other", "mmproj-other"):
        write_tiny_gguf(repository / "snapshots" / "1234" / "folder" / f"{file}.gguf", n_ctx=1024)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    flags = ["--no-page", "--model", str(tiny_model), "--port", free_port(), "--alias", "first"]
    with started("app", *flags, "--switch-models", "--unload-after", "1") as (url, _):
        wait_for_model(url)
        with httpx.Client(base_url=url, timeout=60) as http:

            def model_of(model: str) -> Any:
                body = {"model": model, "prompt": "a", "max_tokens": 1}
                return http.post("/completions", json=body).json()["model"]

            def listed() -> dict[str, str]:
                data = http.get("/models").json()["data"]
                return {one["id"]: one.get("status", {}).get("value", "loaded") for one in data}

            assert model_of("gpt-4o") == "first"
            assert model_of(name) == "other.gguf"
            states = listed()
            assert list(states)[:2] == ["other.gguf", "first"]
            assert (states.pop("other.gguf"), states["first"]) == ("loaded", "unloaded")
            assert (states["bundled"], states["phi-4"]) == ("unloaded", "not downloaded")
            assert not [one for one in states if "mmproj" in one or "eagle" in one]
            for _ in range(100):
                if "loaded" not in listed().values():
                    break
                time.sleep(0.1)
            assert "loaded" not in listed().values()
            assert http.get("/health").status_code == 200
            assert model_of("any") == "other.gguf"
            assert model_of("first") == "first"
            refused = http.post("/completions", json={"model": "phi-4", "prompt": "a"})
            assert refused.status_code == 404
            assert "`speculation models phi-4` downloads it" in refused.json()["error"]["message"]
