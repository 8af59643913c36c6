"""The endpoint as its clients use it: the official openai client, and plain HTTP."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import APIError, APIStatusError, BadRequestError, InternalServerError, OpenAI
from pydantic import BaseModel

from tests.app.browser.chat import free_port, started
from tests.support.tiny_gguf import write_tiny_gguf

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools, called as <tool_call>"
    '{"name": NAME, "arguments": ARGUMENTS}</tool_call>: {{ tools | tojson }}<|end|>{% endif %}'
    "{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'user' }}|>"
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
        },
    },
}
HELLO: list[Any] = [{"role": "user", "content": "a cat saw the dog"}]
SLOW = {"grammar": f'root ::= {"a* " * 6} a root\na ::= [a-z] | "(" root ")"'}  # ambiguous
ENDLESS = {"grammar": "root ::= [a-z] root", "max_tokens": 20_000}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    model = write_tiny_gguf(path, n_ctx=32768, chat_template=TEMPLATE)
    flags = ["--no-page", "--model", str(model), "--ctx", "32768", "--threads", "1"]
    flags += ["--parallel", "4", "--port", free_port(), "--alias", "tiny"]
    with started("app", *flags) as (url, _):
        wait_for_model(url)
        yield url


def wait_for_model(url: str) -> None:
    with httpx.Client(base_url=url[: -len("/v1")], timeout=60) as http:
        for _ in range(200):
            if http.get("/health").status_code == 200:
                return
            time.sleep(0.1)
    raise AssertionError("the model is not loaded")


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address[: -len("/v1")], timeout=60) as made:
        yield made


def test_a_streamed_reply_is_the_whole_reply_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert (whole.model, whole.choices[0].finish_reason) == ("tiny", "length")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_every_method_gives_the_same_reply(client: OpenAI) -> None:
    def reply(method: str, **more: Any) -> str | None:
        found = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=40,
            seed=5,
            extra_body={"speculation": {"method": method, **more}},
        )
        return found.choices[0].message.content

    plain = reply("ar")
    assert plain
    assert reply("prompt-lookup", draft=5) == plain
    assert reply("suffix", memory=False) == plain
    assert reply("auto", memory=False) == plain
    assert reply("lookahead") == plain


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_of_a_tool_has_arguments_that_fit_its_schema(client: OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "seed": 1}
    whole = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
    assert whole.choices[0].message.tool_calls is not None
    (call,) = whole.choices[0].message.tool_calls
    assert (call.type, whole.choices[0].finish_reason) == ("function", "tool_calls")
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2, 3)

    name, text = "", ""
    for chunk in client.chat.completions.create(
        **asked, tool_choice=choice, parallel_tool_calls=False, stream=True
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.function is not None
            name += part.function.name or ""
            text += part.function.arguments or ""
    assert (name, json.loads(text)) == ("weather", arguments)

    silent = client.chat.completions.create(**asked, tool_choice="none", max_tokens=4)
    assert silent.usage is not None and silent.usage.prompt_tokens_details is not None
    assert silent.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    held: dict[str, Any] = {**asked, "extra_body": {"regex": "ab"}}
    found = client.chat.completions.create(**held, tool_choice="none")
    assert found.choices[0].message.content == "ab"
    with pytest.raises(BadRequestError, match="tools come with a grammar of their own"):
        client.chat.completions.create(**held, tool_choice="auto")

    answered = [
        *HELLO,
        whole.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    after = client.chat.completions.create(model="tiny", messages=answered, max_tokens=4)
    assert after.usage is not None and after.usage.prompt_tokens > whole.usage.prompt_tokens - 400


class Forecast(BaseModel):
    city: Literal["Oslo", "Rome"]
    rain: bool


def test_a_structured_reply_fits_its_schema(client: OpenAI) -> None:
    found = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Forecast, seed=2
    )
    assert found.choices[0].message.parsed is not None
    assert found.choices[0].message.parsed.city in ("Oslo", "Rome")


def test_choices_differ_and_share_their_prompt(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=8,
        n=3,
        temperature=1.5,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    assert len({choice.message.content for choice in found.choices}) == 3
    assert found.usage is not None and found.usage.completion_tokens == 24


def test_logprobs_belong_to_the_tokens_of_the_reply(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3, temperature=0
    )
    assert found.choices[0].logprobs is not None
    content = found.choices[0].logprobs.content or []
    assert "".join(one.token for one in content) == found.choices[0].message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob  # greedy


def test_probabilities_after_sampling_are_those_of_the_tokens_that_are_left(
    http: httpx.Client,
) -> None:
    def first_token(**sampling: Any) -> Any:
        asked = {"prompt": "a cat", "n_predict": 1, "n_probs": 10, "post_sampling_probs": True}
        return http.post("/completion", json=asked | sampling).json()["completion_probabilities"][0]

    drawn = first_token(top_k=3, top_p=1, min_p=0, temperature=2)
    assert len(drawn["top_probs"]) == 3
    assert sum(one["prob"] for one in drawn["top_probs"]) == pytest.approx(1)
    assert drawn["prob"] in [one["prob"] for one in drawn["top_probs"]]
    for sampling in ({}, {"repeat_penalty": 1.5}):
        greedy = first_token(temperature=0, **sampling)
        assert [one["id"] for one in greedy["top_probs"]] == [greedy["id"]]
        assert greedy["prob"] == greedy["top_probs"][0]["prob"] == 1


def test_completions_take_texts_tokens_and_lists(client: OpenAI, http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": "the cat", "add_special": True}).json()[
        "tokens"
    ]
    assert (
        http.post("/detokenize", json={"tokens": tokens[1:]}).json()["content"].strip() == "the cat"
    )
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt="the cat", **asked).choices[0].text
    several = client.completions.create(prompt=["the cat", "the cat"], **asked).choices
    given = client.completions.create(prompt=tokens, **asked).choices[0].text
    assert [choice.text for choice in several] == [one, one] == [given, given]
    chunks = list(client.completions.create(prompt="the cat", stream=True, logprobs=1, **asked))
    assert "".join(chunk.choices[0].text for chunk in chunks) == one
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [
        *[None] * (len(chunks) - 1),
        "length",
    ]
    named = [chunk.choices[0].logprobs for chunk in chunks]
    content = [part for found in named if found for part in found.model_dump()["content"]]
    assert (
        bytes(byte for part in content for byte in part["bytes"]).decode("utf-8", "replace") == one
    )
    stopped = http.post(
        "/completion", json={"prompt": "the cat", "temperature": 0, "stop": [one[2:4]]}
    ).json()
    assert (stopped["content"], stopped["stop_type"]) == (one[:2], "word")
    assert stopped["stopping_word"] == one[2:4]
    unknown = http.post("/completion", json={"prompt": [*tokens, -1]})
    assert unknown.status_code == 400
    assert "the prompt has token -1; this model has 0 to" in unknown.json()["error"]["message"]
    mixed = http.post("/completion", json={"prompt": [*tokens, "a dog"], "n_predict": 1}).json()
    assert mixed["prompt"] == "<s>the cata dog"


def test_a_prompt_is_scored_as_evaluation_harnesses_ask(client: OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "tiny", "logprobs": 1, "temperature": 0, "echo": True}
    tokens = http.post("/tokenize", json={"content": HELLO[0]["content"]}).json()["tokens"] * 30
    written = http.post(
        "/completion", json={"prompt": tokens, "n_predict": 6, "n_probs": 1, "temperature": 0}
    ).json()["completion_probabilities"]
    ids = [*tokens, *[one["id"] for one in written]]
    for n_written in (0, 1):
        body = {**asked, "prompt": [ids, ids[:1]], "max_tokens": n_written}
        found = client.completions.create(**body)
        assert found.usage is not None
        assert found.usage.prompt_tokens == len(ids) + 1
        assert found.usage.completion_tokens == 2 * n_written
        first, short = (choice.logprobs for choice in found.choices)
        assert first is not None and first.token_logprobs is not None
        assert len(first.token_logprobs) == len(ids) + n_written
        assert (first.token_logprobs[0], (first.top_logprobs or [0])[0]) == (None, None)
        own = first.token_logprobs[len(tokens) : len(ids)]
        assert own == pytest.approx([one["logprob"] for one in written], abs=1e-2)
        best = [max(top.values()) for top in (first.top_logprobs or [])[len(tokens) : len(ids)]]
        assert own == best  # greedy, as harnesses see it
        assert short is not None and len(short.token_logprobs or []) == 1 + n_written
        (whole,) = client.completions.create(**{**body, "prompt": ids}).choices
        chunks = list(client.completions.create(**{**body, "prompt": ids}, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert [at for part in parts for at in part.text_offset or ()] == first.text_offset
        assert chunks[-1].choices[0].finish_reason == "length"


def test_an_echo_begins_with_the_prompt_and_offsets_count_its_characters(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    reply = client.completions.create(prompt="the cät", **asked).choices[0].text
    found = client.completions.create(prompt="the cät", echo=True, logprobs=0, **asked).choices[0]
    assert found.text == "the cät" + reply
    assert found.logprobs is not None and found.logprobs.text_offset is not None
    assert found.logprobs.tokens is not None
    # BOS and the space that is put in front of the text are not in it.
    assert found.logprobs.tokens[0] == "<s>"
    at = dict(zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True))
    assert sorted(found.logprobs.text_offset) == found.logprobs.text_offset
    assert found.logprobs.text_offset[:2] == [0, 0]
    assert at["t"] == 6
    assert found.logprobs.text_offset[-5] == 7
    (chunk, *_) = client.completions.create(prompt="the cät", echo=True, stream=True, **asked)
    assert chunk.choices[0].text == "the cät"


def test_a_prompt_can_be_read_without_a_reply_and_without_the_cache(http: httpx.Client) -> None:
    prompt = "a dog and a cat and a bird and a fish "
    read = http.post("/completion", json={"prompt": prompt, "n_predict": 0}).json()
    assert (read["content"], read["tokens_predicted"], read["stop_type"]) == ("", 0, "limit")
    n = read["tokens_evaluated"]
    again = http.post("/completion", json={"prompt": prompt, "n_predict": 1}).json()["timings"]
    assert (again["cache_n"], again["prompt_n"]) == (n - 1, 1)
    anew = {"prompt": prompt, "n_predict": 1, "cache_prompt": False}
    timings = http.post("/completion", json=anew).json()["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (0, n)
    chat = {"messages": HELLO, "max_tokens": 0}
    empty = http.post("/v1/chat/completions", json=chat).json()
    assert (empty["choices"][0]["message"]["content"], empty["usage"]["completion_tokens"]) == (
        "",
        0,
    )


def test_usage_counts_each_prompt_once(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "extra_body": {"ignore_eos": True}}
    prompts = ["the cat", "a dog saw the cat"]
    alone = [client.completions.create(prompt=prompt, **asked).usage for prompt in prompts]
    both = client.completions.create(prompt=prompts, n=3, **asked).usage
    *_, last = client.completions.create(
        prompt=prompts, n=3, stream=True, stream_options={"include_usage": True}, **asked
    )
    assert both is not None and last.usage is not None
    assert both.prompt_tokens == sum(one.prompt_tokens for one in alone if one)
    assert (both.completion_tokens, both.total_tokens) == (12, both.prompt_tokens + 12)
    assert last.usage.prompt_tokens == both.prompt_tokens


def test_a_prediction_is_drafted_from(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 100,
        "temperature": 1.5,
    }
    asked |= {"seed": 9, "extra_body": {"speculation": {"method": "prediction"}}}
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content or ""
    predicted = client.chat.completions.create(
        **asked, prediction={"type": "content", "content": text}
    )
    assert predicted.choices[0].message.content == text
    assert plain.usage is not None and predicted.usage is not None
    before, after = (
        found.usage.completion_tokens_details for found in (plain, predicted) if found.usage
    )
    assert before is not None and after is not None
    # A random model's tokens are rarely those into which their text is split.
    assert before.accepted_prediction_tokens == 0
    assert (after.accepted_prediction_tokens or 0) > 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role: Input should be"),
        ({"temperature": -300.0, "top_p": 3}, "top_p is 3; give 0.0 to 1.0"),
        ({"speculation": {"method": "magic"}}, "there is no method 'magic'"),
        (
            {"speculation": {"method": "medusa"}},
            "method medusa needs medusa heads; load them with",
        ),
        (
            {"speculation": {"method": "./examples/forks.py:spec"}},
            "method is './examples/forks.py:spec', but requests cannot name a file; start the",
        ),
        ({"grammar": "nonsense"}, "the grammar does not parse"),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "a b"),
        ({"dynatemp_range": 1}, "not supported"),
        (
            {"messages": [{"role": "user", "content": "a" * 40_000}]},
            "since the model was trained for",
        ),
    ],
)
def test_a_request_that_cannot_be_met_gets_400_and_the_reason(
    http: httpx.Client, more: dict[str, Any], reason: str
) -> None:
    for stream in (False, True):
        asked = {"messages": HELLO, "max_tokens": 5, "stream": stream, **more}
        answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert reason in error["message"]
        is_long = "trained" in reason
        assert error["type"] == (
            "exceed_context_size_error" if is_long else "invalid_request_error"
        )


def test_an_error_of_the_engine_names_the_field_as_the_request_does(http: httpx.Client) -> None:
    for name, value, reason in (
        ("top_p", 3, "top_p is 3; give 0.0 to 1.0"),
        ("repeat_last_n", -5, "repeat_last_n is -5; give -1 to"),
        ("dry_penalty_last_n", -2, "dry_penalty_last_n is -2; give -1 to"),
    ):
        answer = http.post("/completion", json={"prompt": "a", name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert reason in error["message"]
    long = http.post("/completion", json={"prompt": "a" * 40_000}).json()["error"]
    assert (long["code"], long["n_ctx"]) == ("context_length_exceeded", 32768)
    assert "exceeds the available context size" in long["message"]


def test_the_client_raises_what_the_endpoint_says(client: OpenAI, address: str) -> None:
    with pytest.raises(BadRequestError, match="top_p is"):
        client.chat.completions.create(model="tiny", messages=HELLO, top_p=7)
    with pytest.raises(APIStatusError, match="no model 'gpt' is loaded; this is tiny"):
        client.models.retrieve("gpt")
    names = [model.id for model in client.models.list()]
    assert names[0] == "tiny" and {"bundled", "phi-4"} <= set(names[1:])


def test_a_client_that_goes_away_frees_its_place(http: httpx.Client) -> None:
    def n_running() -> int:
        return sum(slot["is_processing"] for slot in http.get("/slots").json())

    asked = {"messages": HELLO, **ENDLESS}
    for path, stream in (("/v1/chat/completions", True), ("/completion", False)):
        body = {**asked, "prompt": "a", "stream": stream, "speculation": {"method": "ar"}}
        with httpx.Client(base_url=http.base_url, timeout=0.5) as other:
            if stream:
                with other.stream("POST", path, json=body) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    other.post(path, json=body)
        deadline = time.monotonic() + 5
        while (found := n_running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == 0


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
            reply = http.post("/completion", json={"prompt": "a", "n_predict": 3, **given})
            assert reply.json()["generation_settings"]["speculation"] == method
        for name in ("mine.py:other", "theirs.py:spec", "mine.py:spec"):
            asked = {"prompt": "a", "speculation": {"method": f"{tmp_path / name}:draft=2"}}
            refused = http.post("/completion", json=asked)
            assert refused.status_code == 400
            assert "requests cannot name a file" in refused.json()["error"]["message"]
        assert ran.read_text() == "xx"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends signals another way")
def test_sigterm_saves_the_memory_of_a_service(tiny_model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    flags = ["--no-page", "--model", str(tiny_model), "--port", free_port()]
    with started("app", *flags, "--memory", str(memory)) as (url, process):
        wait_for_model(url)
        process.terminate()
        assert process.wait(60) == 0
    assert memory.read_bytes().startswith(b"SUFFIX 1")


def test_keys_origins_and_times_are_limited_by_flags(tmp_path: Path) -> None:
    long = write_tiny_gguf(tmp_path / "long.gguf", n_ctx=32768)  # not full within a second
    flags = ["--no-page", "--model", str(long), "--threads", "1", "--port", free_port()]
    flags += ["--api-key", "first", "--api-key", "second", "--allow-host", "editor.example"]
    with started("app", *flags, "--timeout", "1", "--parallel", "1") as (url, _):
        wait_for_model(url)
        with httpx.Client(base_url=url[: -len("/v1")], timeout=60) as http:
            body = {"messages": HELLO, "max_tokens": 1, "prompt": "a", "content": "a"}
            key = {"Authorization": "Bearer second"}
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("POST", "/v1/chat/completions"),
                ("POST", "/completion"),
                ("POST", "/tokenize"),
            ):
                for headers, status in (
                    ({}, 401),
                    ({**key, "Origin": "https://editor.example"}, 200),
                    ({**key, "Origin": "https://evil.example"}, 403),
                ):
                    found = http.request(method, path, json=body, headers=headers)
                    assert found.status_code == status

        with OpenAI(base_url=url, api_key="first", max_retries=0) as client:
            endless: dict[str, Any] = {"model": "any", "messages": HELLO, "extra_body": SLOW}
            with pytest.raises(InternalServerError, match="took longer than 1 s") as late:
                client.chat.completions.create(**endless)
            assert late.value.status_code == 504
            stream = client.chat.completions.create(**endless, stream=True)
            with pytest.raises(APIError, match="took longer than 1 s"):
                list(stream)
            endless["max_tokens"] = 1
            assert client.chat.completions.create(**endless).choices[0].finish_reason == "length"
