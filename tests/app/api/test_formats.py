"""The endpoint with models of several formats: their calls of tools, and their reasoning.

A grammar makes a model of random weights say what such models say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from app.api.service import Service
from app.hosts import address, bind
from app.server import endpoint, guard, serve
from app.worker import preparation, serving
from app.worker.messages import Loaded, ModelSpec
from speculation.sampling import SamplingParams
from tests.speculation.chat.tool_templates import FAMILIES
from tests.support.local_backend import LocalBackend
from tests.support.tiny_gguf import write_tiny_gguf

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
DIGITS = "digits\ndigits ::= [0-9] digits"  # without end
ASKED: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "a cat"}]}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    backend = LocalBackend()
    yield Service(backend)
    backend.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[OpenAI]:
    listening = bind("127.0.0.1", 0)
    serve(guard(endpoint(service), "127.0.0.1"), listening)
    url = address("127.0.0.1", listening)
    with OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def load(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Loads a model with a template, and an opening mark at its end."""
    folder: Path = tmp_path_factory.mktemp("formats")
    model = write_tiny_gguf(folder / "tiny.gguf", n_ctx=4096)

    def load(template: str = FAMILIES["none"].template, opening: str = "") -> None:
        path = folder / "template.jinja"
        path.write_text(template + opening)
        spec = ModelSpec(str(model), n_threads=1, parallel=1, chat_template=str(path))
        assert isinstance(list(service.backend.load(spec))[-1], Loaded)

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
        "json after a tag, one call",
        "names and json between marks",
        "a list of json, with ids",
        "an element for each argument",
        "bare keys",
        "none",
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
    made = [
        [call.function.name, call.function.arguments]
        for call in whole.message.tool_calls or ()
        if call.type == "function"
    ]
    assert [(tool, json.loads(given)) for tool, given in made] == [
        ("add", {"a": [1, "}"]}),
        ("now", {}),
    ]
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
            whole = client.chat.completions.create(**asked).choices[0]
            assert whole.finish_reason == reason
            assert whole.message.tool_calls is not None
            (call,) = whole.message.tool_calls
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            with pytest.raises(ValueError, match=r"delimiter|Expecting"):
                json.loads(call.function.arguments)
            _, calls, streamed_reason = streamed(client, **asked)
            assert calls == [["add", call.function.arguments]]
            assert streamed_reason == reason
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
    client: OpenAI, load: Callable[..., None], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    monkeypatch.setattr(serving, "MOST_WAITING", 1)
    running = client.chat.completions.create(
        **ASKED, stream=True, extra_body={"grammar": "root ::= [a-z] root"}
    )
    next(running)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.chat.completions.create(**ASKED, max_tokens=2))
        while service.backend.report().n_waiting < 1:
            time.sleep(0.01)
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
