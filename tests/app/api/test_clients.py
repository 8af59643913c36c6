"""A served model as its clients use it: the official openai and anthropic clients, and HTTP."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from anthropic import Anthropic
from openai import APIError, APIStatusError, BadRequestError, InternalServerError, OpenAI
from pydantic import BaseModel

from app.api.infill import fitted
from tests.app.browser.chat import free_port, started
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.waiting import wait_until

Body = dict[str, Any]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools, called as <tool_call>"
    '{"name": NAME, "arguments": ARGUMENTS}</tool_call>: {{ tools | tojson }}<|end|>{% endif %}'
    "{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'user' }}|>"
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}"
)
FIELDS = {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}}
PARAMETERS = {"type": "object", "properties": FIELDS, "required": ["city", "days"]}
NAMED = {"name": "weather", "description": "The weather in a city"}
WEATHER: Any = {"type": "function", "function": {**NAMED, "parameters": PARAMETERS}}
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
HELLO: list[Any] = [{"role": "user", "content": "a cat saw the dog"}]
ASKED: Body = {"model": "tiny", "messages": HELLO}
SLOW = {"grammar": f'root ::= {"a* " * 6} a root\na ::= [a-z] | "(" root ")"'}  # ambiguous
ENDLESS = {"grammar": "root ::= [a-z] root", "max_tokens": 20_000}


def add_fim(writer: Any) -> None:
    for name, token in (("pre", 259), ("suf", 260), ("mid", 261)):  # <|system|>, <|user|>, …
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token)


def wait_for_model(url: str) -> None:
    with httpx.Client(base_url=url[: -len("/v1")], timeout=60) as http:
        for _ in range(200):
            if http.get("/health").status_code == 200:
                return
            time.sleep(0.1)
    raise AssertionError("the model is not loaded")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    model = write_tiny_gguf(path, n_ctx=32768, chat_template=TEMPLATE, more=add_fim)
    flags = ["--no-page", "--model", str(model), "--ctx", "32768", "--threads", "1"]
    flags += ["--parallel", "4", "--port", free_port(), "--alias", "tiny"]
    with started("app", *flags) as (url, _):
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


def test_a_streamed_reply_is_the_whole_reply_in_pieces(client: OpenAI) -> None:
    asked: Body = {**ASKED, "max_tokens": 20, "seed": 3}
    create: Any = client.chat.completions.create
    whole = create(**asked)
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, end, last = create(**asked, **counted)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content != ""
    assert (whole.model, whole.choices[0].finish_reason) == ("tiny", "length")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert end.choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 20
    assert last.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_every_method_gives_the_same_reply(client: OpenAI) -> None:
    def reply(**speculation: Any) -> str | None:
        more = {"speculation": speculation}
        found = client.chat.completions.create(**ASKED, max_tokens=40, seed=5, extra_body=more)
        return found.choices[0].message.content

    plain = reply(method="ar")
    assert plain
    assert reply(method="prompt-lookup", draft=5) == plain
    assert reply(method="suffix", memory=False) == reply(method="auto", memory=False) == plain
    assert reply(method="lookahead") == plain


def fits(arguments: Any) -> bool:
    return arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2, 3)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_of_a_tool_has_arguments_that_fit_its_schema(client: OpenAI, choice: Any) -> None:
    create: Any = client.chat.completions.create
    asked = {**ASKED, "tools": [WEATHER], "seed": 1}
    called = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
    whole = create(**called)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.type, whole.choices[0].finish_reason) == ("function", "tool_calls")
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert fits(arguments)
    chunks = create(**called, stream=True)
    parts = [part.function for c in chunks for part in c.choices[0].delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == "weather"
    assert json.loads("".join(part.arguments or "" for part in parts)) == arguments

    silent = create(**asked, tool_choice="none", max_tokens=4).usage
    assert silent.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    held = {**asked, "extra_body": {"regex": "ab"}}
    assert create(**held, tool_choice="none").choices[0].message.content == "ab"
    with pytest.raises(BadRequestError, match="tools come with a grammar of their own"):
        create(**held, tool_choice="auto")
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = {**ASKED, "messages": [*HELLO, whole.choices[0].message, result], "max_tokens": 4}
    assert create(**after).usage.prompt_tokens > whole.usage.prompt_tokens - 400


def first_call(ask: Callable[..., Any], **asked: Any) -> tuple[Body, Any]:
    """What was asked with the first seed with which a reply begins with a call, and that reply:
    the model is random, and may begin with a thought that never ends."""
    for seed in range(20):
        asked["extra_body"] = {"seed": seed}
        reply = ask(**asked)
        first = (reply.output if hasattr(reply, "output") else reply.content)[0]
        if first.type in ("function_call", "tool_use"):
            return asked, reply
    raise AssertionError("no reply begins with a call")


def test_a_response_calls_a_tool_and_takes_its_result(client: OpenAI) -> None:
    create: Any = client.responses.create
    tool = {"type": "function", **WEATHER["function"]}
    asked: Body = {"model": "any", "input": "a cat", "tools": [tool], "max_output_tokens": 300}
    choice: Body = {"tool_choice": "required", "parallel_tool_calls": False}
    asked, whole = first_call(create, **asked, **choice)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "weather"
    assert fits(json.loads(call.arguments)) and whole.status == "completed"
    events = list(create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(e.delta for e in events if "delta" in e.type) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more: Body = {"tools": [tool], "tool_choice": "none", "max_output_tokens": 4}
    after = create(model="any", previous_response_id=whole.id, input=[result], **more)
    assert after.usage.input_tokens_details.cached_tokens > 0
    assert [item.type for item in after.output] == ["message"]


def test_a_message_uses_a_tool_and_takes_its_result(anthropic: Anthropic) -> None:
    create: Any = anthropic.messages.create
    count: Any = anthropic.messages.count_tokens
    tool = {**NAMED, "input_schema": PARAMETERS}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked: Body = {"model": "any", "max_tokens": 300, "messages": HELLO, "tools": [tool]}
    asked, whole = first_call(create, **asked, tool_choice=choice)
    (call,) = whole.content
    assert call.type == "tool_use" and call.name == "weather" and fits(call.input)
    assert whole.stop_reason == "tool_use"
    parts = [
        event.delta.partial_json
        for event in create(**asked, stream=True)
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert json.loads("".join(parts)) == call.input
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    said = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after: Body = {"model": "any", "messages": [*HELLO, *said], "tools": [tool]}
    assert count(**after).input_tokens > whole.usage.input_tokens
    assert create(**after, max_tokens=3, tool_choice={"type": "none"}).usage.output_tokens <= 3

    def n_read(**asked: Any) -> int:
        usage = create(**asked, max_tokens=1).usage
        return int(usage.input_tokens + (usage.cache_read_input_tokens or 0))

    plain = {"model": "any", "messages": HELLO}
    assert count(**plain).input_tokens == n_read(**plain)
    late = {"name": "late", "description": "d", "input_schema": {}, "defer_loading": True}
    result["content"] = [{"type": "tool_reference", "tool_name": "late"}]
    after |= {"tools": [late, tool]}
    n_tokens = n_read(**after, tool_choice={"type": "tool", "name": "late"})
    result["content"] = '<function>{"name":"late","description":"d","parameters":{}}</function>'
    assert n_tokens == count(**after).input_tokens
    assert n_tokens == count(**{**after, "tools": [tool]}).input_tokens


class Forecast(BaseModel):
    city: Literal["Oslo", "Rome"]
    rain: bool


def test_a_structured_reply_fits_its_schema(client: OpenAI) -> None:
    chat = client.chat.completions.parse(**ASKED, response_format=Forecast, seed=2)
    response = client.responses.parse(model="any", input="a cat", text_format=Forecast)
    for parsed in (chat.choices[0].message.parsed, response.output_parsed):
        assert parsed is not None and parsed.city in ("Oslo", "Rome")
    counted = client.responses.input_tokens.count(model="any", input="a cat")
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens


def test_logprobs_belong_to_the_tokens_of_the_reply(client: OpenAI) -> None:
    more: Body = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    (found,) = client.chat.completions.create(**ASKED, max_tokens=6, **more).choices
    assert found.logprobs is not None
    content = found.logprobs.content or []
    assert "".join(one.token for one in content) == found.message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob  # greedy


def test_probabilities_after_sampling_are_those_of_the_tokens_that_are_left(
    http: httpx.Client,
) -> None:
    def first_token(**sampling: Any) -> Any:
        asked = {"prompt": "a cat", "n_predict": 1, "n_probs": 10, "post_sampling_probs": True}
        return http.post(NATIVE, json=asked | sampling).json()["completion_probabilities"][0]

    drawn = first_token(top_k=3, top_p=1, min_p=0, temperature=2)
    assert len(drawn["top_probs"]) == 3
    assert sum(one["prob"] for one in drawn["top_probs"]) == pytest.approx(1)
    assert drawn["prob"] in [one["prob"] for one in drawn["top_probs"]]
    for sampling in ({}, {"repeat_penalty": 1.5}):
        greedy = first_token(temperature=0, **sampling)
        assert [one["id"] for one in greedy["top_probs"]] == [greedy["id"]]
        assert greedy["prob"] == greedy["top_probs"][0]["prob"] == 1


def test_completions_take_texts_tokens_and_lists(client: OpenAI, http: httpx.Client) -> None:
    def post(path: str, **asked: Any) -> Any:
        return http.post(path, json=asked).json()

    tokens = post("/tokenize", content="the cat", add_special=True)["tokens"]
    assert post("/detokenize", tokens=tokens[1:])["content"].strip() == "the cat"
    asked: Body = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt="the cat", **asked).choices[0].text
    several = client.completions.create(prompt=["the cat", "the cat"], **asked).choices
    given = client.completions.create(prompt=tokens, **asked).choices[0].text
    assert [choice.text for choice in several] == [one, one] == [given, given]
    chunks = list(client.completions.create(prompt="the cat", stream=True, logprobs=1, **asked))
    assert "".join(chunk.choices[0].text for chunk in chunks) == one
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends == [*[None] * (len(chunks) - 1), "length"]
    named = [chunk.choices[0].logprobs for chunk in chunks]
    content = [part for found in named if found for part in found.model_dump()["content"]]
    said = bytes(byte for part in content for byte in part["bytes"])
    assert said.decode("utf-8", "replace") == one
    stopped = post(NATIVE, prompt="the cat", temperature=0, stop=[one[2:4]])
    assert (stopped["content"], stopped["stop_type"]) == (one[:2], "word")
    assert stopped["stopping_word"] == one[2:4]
    mixed = post(NATIVE, prompt=[*tokens, "a dog"], n_predict=1)
    assert mixed["prompt"] == "<s>the cata dog"


def test_a_prompt_is_scored_as_evaluation_harnesses_ask(client: OpenAI, http: httpx.Client) -> None:
    create: Any = client.completions.create
    tokens = http.post("/tokenize", json={"content": HELLO[0]["content"]}).json()["tokens"] * 30
    more = {"prompt": tokens, "n_predict": 6, "n_probs": 1, "temperature": 0}
    written = http.post(NATIVE, json=more).json()["completion_probabilities"]
    ids = [*tokens, *[one["id"] for one in written]]
    asked: Body = {"model": "tiny", "logprobs": 1, "temperature": 0, "echo": True}
    for n_written in (0, 1):
        asked["max_tokens"] = n_written
        found = create(**asked, prompt=[ids, ids[:1]])
        assert found.usage.prompt_tokens == len(ids) + 1
        assert found.usage.completion_tokens == 2 * n_written
        first, short = (choice.logprobs for choice in found.choices)
        assert len(first.token_logprobs) == len(ids) + n_written
        assert (first.token_logprobs[0], first.top_logprobs[0]) == (None, None)
        own = first.token_logprobs[len(tokens) : len(ids)]
        assert own == pytest.approx([one["logprob"] for one in written], abs=1e-2)
        best = [max(top.values()) for top in first.top_logprobs[len(tokens) : len(ids)]]
        assert own == best  # greedy, as harnesses see it
        assert len(short.token_logprobs) == 1 + n_written
        (whole,) = create(**asked, prompt=ids).choices
        chunks = list(create(**asked, prompt=ids, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert [at for part in parts for at in part.text_offset or ()] == first.text_offset
        assert chunks[-1].choices[0].finish_reason == "length"


def test_an_echo_begins_with_the_prompt_and_offsets_count_its_characters(client: OpenAI) -> None:
    create: Any = client.completions.create
    asked: Body = {"model": "tiny", "max_tokens": 5, "temperature": 0, "prompt": "the cät"}
    reply = create(**asked).choices[0].text
    found = create(**asked, echo=True, logprobs=0).choices[0]
    assert found.text == "the cät" + reply
    # BOS and the space that is put in front of the text are not in it.
    tokens, offsets = found.logprobs.tokens, found.logprobs.text_offset
    assert tokens[0] == "<s>"
    assert sorted(offsets) == offsets
    assert offsets[:2] == [0, 0]
    assert dict(zip(tokens, offsets, strict=True))["t"] == 6
    assert offsets[-5] == 7
    (chunk, *_) = create(**asked, echo=True, stream=True)
    assert chunk.choices[0].text == "the cät"


def test_a_prompt_can_be_read_without_a_reply_and_without_the_cache(http: httpx.Client) -> None:
    def complete(**asked: Any) -> Any:
        prompt = "a dog and a cat and a bird and a fish "
        return http.post(NATIVE, json={"prompt": prompt, **asked}).json()

    read = complete(n_predict=0)
    assert (read["content"], read["tokens_predicted"], read["stop_type"]) == ("", 0, "limit")
    n = read["tokens_evaluated"]
    again = complete(n_predict=1)["timings"]
    assert (again["cache_n"], again["prompt_n"]) == (n - 1, 1)
    anew = complete(n_predict=1, cache_prompt=False)["timings"]
    assert (anew["cache_n"], anew["prompt_n"]) == (0, n)
    empty = http.post(CHAT, json={"messages": HELLO, "max_tokens": 0}).json()
    assert empty["choices"][0]["message"]["content"] == ""
    assert empty["usage"]["completion_tokens"] == 0


def test_choices_differ_and_usage_counts_each_prompt_once(client: OpenAI) -> None:
    create: Any = client.completions.create
    asked: Body = {"model": "tiny", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    prompts = ["the cat", "a dog saw the cat"]
    alone = [create(prompt=prompt, **asked).usage.prompt_tokens for prompt in prompts]
    asked |= {"prompt": prompts, "n": 3}
    found = create(**asked, temperature=1.5, seed=1)
    assert len({choice.text for choice in found.choices[:3]}) == 3
    both = found.usage
    *_, last = create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens == both.prompt_tokens == sum(alone)
    assert (both.completion_tokens, both.total_tokens) == (48, both.prompt_tokens + 48)


def test_a_prediction_is_drafted_from(client: OpenAI) -> None:
    asked: Body = {**ASKED, "max_tokens": 100, "temperature": 1.5, "seed": 9}
    asked["extra_body"] = {"speculation": {"method": "prediction"}}

    def reply(**more: Any) -> tuple[str, int]:
        found: Any = client.chat.completions.create(**asked, **more)
        details = found.usage.completion_tokens_details
        return found.choices[0].message.content, details.accepted_prediction_tokens

    text, n_accepted = reply()
    # A random model's tokens are rarely those into which their text is split.
    assert n_accepted == 0
    again, n_accepted = reply(prediction={"type": "content", "content": text})
    assert again == text and n_accepted > 0


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


def test_a_gap_is_filled_between_prefix_and_suffix(http: httpx.Client) -> None:
    def infill(**more: Any) -> Any:
        asked = {"input_prefix": "the cat", "input_suffix": "a dog", "prompt": "saw"}
        return http.post("/infill", json={**asked, "temperature": 0, **more}).json()

    found = infill(n_predict=3)
    gap = "<s><|system|>the catsaw<|user|>a dog<|assistant|>"
    assert (found["prompt"], found["tokens_predicted"]) == (gap, 3)
    extra = [{"filename": "b", "text": "th"}, {"text": "he"}]
    begin = "<s>" + "\n\nb\nth" + "\n\nsnippet\nhe"
    assert infill(n_predict=1, input_extra=extra)["prompt"] == begin + gap.removeprefix("<s>")
    filled = infill(prompt="", n_predict=3)
    before = {"prompt": ["the cat"] * 2, "suffix": "a dog", "max_tokens": 3, "temperature": 0}
    both = http.post(TEXT, json=before).json()
    assert [one["text"] for one in both["choices"]] == [filled["content"]] * 2
    assert both["usage"]["prompt_tokens"] == 2 * filled["tokens_evaluated"]


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
    kept = [*(1, *extra[10 - n_extra :]), *(-1, *prefix[10 - n_prefix :], 7)]
    assert found == [*kept, -2, *suffix[:n_suffix], -3]


VECTORS, INFILL = "/v1/embeddings", "/infill"
GAP: Body = {"prompt": ["the cat"] * 2, "suffix": "a dog"}
PARTS: Body = {"input_prefix": "the cat", "input_suffix": "a dog", "prompt": "saw"}
# fmt: off
REFUSED: list[tuple[str, Body, str | None, str]] = [
    (CHAT, {"temperature": -300.0, "top_p": 3}, "top_p", "top_p is 3; give 0.0 to 1.0"),
    (CHAT, {"speculation": {"method": "magic"}}, None, "there is no method 'magic'"),
    (CHAT, {"speculation": {"method": "medusa"}}, None,
     "method medusa needs medusa heads; load them with"),
    (CHAT, {"speculation": {"method": "lookahead:window=0"}}, None, "is 0; give 1 to 128"),
    (CHAT, {"speculation": {"method": "./examples/forks.py:spec"}}, None,
     "method is './examples/forks.py:spec', but requests cannot name a file; start the"),
    (CHAT, {"grammar": "nonsense"}, None, "the grammar does not parse"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, None,
     "JSON schema"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "a b"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 40_000}]}, None,
     "since the model was trained for"),
    (NATIVE, {"prompt": "a" * 40_000}, None, "exceeds the available context size"),
    (NATIVE, {"prompt": "a", "top_p": 3}, "top_p", "top_p is 3; give 0.0 to 1.0"),
    (NATIVE, {"prompt": "a", "repeat_last_n": -5}, "repeat_last_n", "is -5; give -1 to"),
    (NATIVE, {"prompt": "a", "dry_penalty_last_n": -2}, "dry_penalty_last_n", "-2; give -1 to"),
    (NATIVE, {"prompt": [5, -1]}, None, "the prompt has token -1; this model has 0 to"),
    (VECTORS, {"input": []}, None, "input has 0 texts; give 1 to 2048"),
    (VECTORS, {"input": ["a"] * 2049}, None, "input has 2049 texts"),
    (VECTORS, {"dimensions": 33}, None, "dimensions is 33; this model's vectors have 32"),
    (VECTORS, {"dimensions": 0}, None, "dimensions"),
    (VECTORS, {"input": "a" * 33_000}, None, "0 has 33001 tokens, and the model reads 32768 at"),
    (VECTORS, {"input": ["a", [5, 10**6]]}, None, "text 1 has token 1000000; this model has 0 to"),
    (VECTORS, {"input": [1, "a"]}, None, "an input has texts and token ids"),
    (VECTORS, {"encoding_format": "int8"}, None, "encoding_format"),
    (INFILL, {**PARTS, "input_extra": [{"filename": "ok"}]}, None, "text"),
    (INFILL, {**PARTS, "input_extra": [{}]}, None, "text"),
    (INFILL, {**PARTS, "prompt": 5}, None, "prompt"),
    (TEXT, {**GAP, "prompt": [5]}, None, "suffix"),
    (TEXT, {**GAP, "echo": True}, None, "suffix"),
    (NATIVE, GAP, None, "suffix"),
]
# fmt: on


@pytest.mark.parametrize(("path", "more", "field", "reason"), REFUSED)
def test_a_request_that_cannot_be_met_gets_400_and_the_reason(
    http: httpx.Client, path: str, more: Body, field: str | None, reason: str
) -> None:
    for stream in (False, True):
        asked = {"messages": HELLO, "max_tokens": 5, "stream": stream, "input": "a", **more}
        answer = http.post(path, json=asked)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert reason in error["message"]
        assert field is None or error["param"] == field
        is_long = "a" * 33_000 in str(more)
        kind = "exceed_context_size_error" if is_long else "invalid_request_error"
        assert error["type"] == kind
        assert not is_long or (error["code"], error["n_ctx"]) == ("context_length_exceeded", 32768)


def test_the_client_raises_what_the_endpoint_says(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="top_p is"):
        client.chat.completions.create(**ASKED, top_p=7)
    with pytest.raises(APIStatusError, match="no model 'gpt' is loaded; this is tiny"):
        client.models.retrieve("gpt")
    names = [model.id for model in client.models.list()]
    assert names[0] == "tiny" and {"bundled", "phi-4"} <= set(names[1:])


def test_a_client_that_goes_away_frees_its_place(http: httpx.Client) -> None:
    asked = {"messages": HELLO, **ENDLESS, "prompt": "a", "speculation": {"method": "ar"}}

    def n_running() -> int:
        return sum(slot["is_processing"] for slot in http.get("/slots").json())

    for path, stream in ((CHAT, True), (NATIVE, False)):
        body = {**asked, "stream": stream}
        with httpx.Client(base_url=http.base_url, timeout=60 if stream else 0.5) as other:
            if stream:
                with other.stream("POST", path, json=body) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    other.post(path, json=body)
        wait_until(lambda: not n_running())


def test_the_server_describes_itself(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["total_slots"] == 4
    assert props["chat_template"] == TEMPLATE
    method = next(one for one in props["methods"] if one["name"] == "suffix")
    assert {"name", "default", "description"} == set(method["parameters"][0])
    asked = {"messages": HELLO}
    rendered = http.post("/apply-template", json=asked).json()["prompt"]
    bare = http.post("/apply-template", json={**asked, "add_generation_prompt": False}).json()
    assert rendered == bare["prompt"] + "<|assistant|>"
    assert rendered == "<s><|user|>a cat saw the dog<|end|><|assistant|>"
    lines = http.get("/metrics").text.splitlines()
    named = {line.split(" ")[0].split("{")[0] for line in lines if not line.startswith("#")}
    assert {
        "llamacpp:tokens_predicted_total",
        "llamacpp:requests_processing",
        "llamacpp:spec_decode_num_draft_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        "llamacpp:requests_deferred",
    } <= named


# Servers with flags of their own


def test_a_method_of_a_file_is_offered_by_name_but_no_request_can_run_a_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(
        f"with open({str(ran)!r}, 'a') as file: file.write('x')\n"
        "from speculation.methods.prompt_lookup import spec as known\n"
        "from dataclasses import replace\n"
        "spec, other = (replace(known, name=n, title=n) for n in ('mine', 'theirs'))\n"
    )
    (tmp_path / "theirs.py").write_text((tmp_path / "mine.py").read_text())
    flags = ["--no-browser", "--model", str(tiny_model), "--threads", "1", "--port", free_port()]
    flags += ["--method", f"{tmp_path / 'mine.py'}:spec:draft=3"]
    with started("app", *flags) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        wait_for_model(f"{url}v1")
        assert ran.read_text() == "xx"  # in both processes
        assert "mine" in [method["name"] for method in http.get("/props").json()["methods"]]
        offered = http.get("/page/state").json()["methods"]
        assert {"name": "mine", "title": "mine"}.items() <= offered[-1].items()
        assert '\\"method\\": \\"mine:draft=3\\"' in http.get("/config").text
        for given, method in (({}, "mine:draft=3"), ({"speculation": {"method": "mine"}}, "mine")):
            reply = http.post(NATIVE, json={"prompt": "a", "n_predict": 3, **given})
            assert reply.json()["generation_settings"]["speculation"] == method
        for name in ("mine.py:other", "theirs.py:spec", "mine.py:spec"):
            asked = {"prompt": "a", "speculation": {"method": f"{tmp_path / name}:draft=2"}}
            refused = http.post(NATIVE, json=asked)
            assert refused.status_code == 400
            assert "requests cannot name a file" in refused.json()["error"]["message"]
        assert ran.read_text() == "xx"


def test_keys_origins_and_times_are_limited_by_flags_and_sigterm_saves_the_memory(
    tmp_path: Path,
) -> None:
    memory = tmp_path / "memory"
    long = write_tiny_gguf(tmp_path / "long.gguf", n_ctx=32768)  # not full within a second
    flags = ["--no-page", "--model", str(long), "--threads", "1", "--port", free_port()]
    flags += ["--api-key", "first", "--api-key", "second", "--allow-host", "editor.example"]
    flags += ["--timeout", "1", "--parallel", "1", "--memory", str(memory)]
    with started("app", *flags) as (url, process):
        wait_for_model(url)
        key = {"Authorization": "Bearer second"}
        body = {"messages": HELLO, "max_tokens": 1, "prompt": "a", "content": "a"}
        with httpx.Client(base_url=url[: -len("/v1")], timeout=60) as http:
            for path in ("/v1/models", "/metrics", CHAT, NATIVE, "/tokenize"):
                method = "GET" if path in ("/v1/models", "/metrics") else "POST"
                for headers, status in (
                    ({}, 401),
                    ({**key, "Origin": "https://editor.example"}, 200),
                    ({**key, "Origin": "https://evil.example"}, 403),
                ):
                    found = http.request(method, path, json=body, headers=headers)
                    assert found.status_code == status

        with OpenAI(base_url=url, api_key="first", max_retries=0) as client:
            endless: Body = {"model": "any", "messages": HELLO, "extra_body": SLOW}
            with pytest.raises(InternalServerError, match="took longer than 1 s") as late:
                client.chat.completions.create(**endless)
            assert late.value.status_code == 504
            stream = client.chat.completions.create(**endless, stream=True)
            with pytest.raises(APIError, match="took longer than 1 s"):
                list(stream)
            endless["max_tokens"] = 1
            assert client.chat.completions.create(**endless).choices[0].finish_reason == "length"
        if sys.platform != "win32":  # which sends signals another way
            process.terminate()
            assert process.wait(60) == 0
            assert memory.read_bytes().startswith(b"SUFFIX 1")


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
    with (
        started("app", *flags, "--switch-models", "--unload-after", "1") as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        wait_for_model(url)

        def complete(model: str) -> httpx.Response:
            body = {"model": model, "prompt": "a", "max_tokens": 1}
            return http.post("/completions", json=body)

        def listed() -> dict[str, str]:
            data = http.get("/models").json()["data"]
            return {one["id"]: one.get("status", {}).get("value", "loaded") for one in data}

        assert complete("gpt-4o").json()["model"] == "first"
        assert complete(name).json()["model"] == "other.gguf"
        states = listed()
        assert list(states)[:2] == ["other.gguf", "first"]
        assert (states.pop("other.gguf"), states["first"]) == ("loaded", "unloaded")
        assert (states["bundled"], states["phi-4"]) == ("unloaded", "not downloaded")
        assert not [one for one in states if "mmproj" in one or "eagle" in one]
        wait_until(lambda: "loaded" not in listed().values())
        assert http.get("/health").status_code == 200
        assert complete("any").json()["model"] == "other.gguf"
        assert complete("first").json()["model"] == "first"
        refused = complete("phi-4")
        assert refused.status_code == 404
        assert "`speculation models phi-4` downloads it" in refused.json()["error"]["message"]
