"""The endpoint with models of several formats: their calls of tools, and their reasoning.

A grammar makes a model of random weights say what such models say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from app.api.service import Service
from app.server import address, bind, endpoint, guard, serve
from app.worker import preparation, serving
from app.worker.messages import Loaded, ModelSpec
from tests.support.local_backend import LocalBackend
from tests.support.tiny_gguf import write_tiny_gguf

TEMPLATE = (
    "{{ bos_token }}{% if tools %}FORMAT {{ tools | tojson }}{% endif %}{% for message in messages "
    "%}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>OPENING"
)
FORMATS = {
    "Llama 3": 'Environment: ipython {"name": NAME, "parameters": ARGUMENTS}',
    "Mistral": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "Mistral up to Nemo": "[TOOL_CALLS] [CALLS]",
    "Gemma": "<|tool_call>call:NAME{ARGUMENTS}<tool_call|>",
}
CALLS = {
    "Llama 3": '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo", "days": [1, 2]}}; '
    '{"name": "now", "parameters": {}}',
    "Mistral": 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": [1, 2]}'
    "[TOOL_CALLS]now[ARGS]{}",
    "Mistral up to Nemo": 'Well. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", '
    '"days": [1, 2]}}, {"name": "now", "arguments": {}}]',
    "Gemma": 'Well.<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,2]}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
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
    """Loads a model whose template names a format of calls, and ends with an opening mark."""
    folder: Path = tmp_path_factory.mktemp("formats")
    model = write_tiny_gguf(folder / "tiny.gguf", n_ctx=4096)

    def load(format_: str = "", opening: str = "") -> None:
        template = folder / "template.jinja"
        template.write_text(TEMPLATE.replace("FORMAT", format_).replace("OPENING", opening))
        spec = ModelSpec(str(model), n_threads=1, parallel=1, chat_template=str(template))
        assert isinstance(list(service.backend.load(spec))[-1], Loaded)

    return load


def saying(text: str) -> dict[str, str]:
    """Sampling that makes a model say a text."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


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


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_tools_are_read_in_every_format(
    client: OpenAI, load: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load(FORMATS[name])
    asked = {**ASKED, "tools": TOOLS}
    monkeypatch.setattr(preparation, "_tool_grammar", lambda *_: saying(CALLS[name]))
    whole = client.chat.completions.create(**asked).choices[0]
    content = "Well." if name != "Llama 3" else None
    assert (whole.message.content, whole.finish_reason) == (content, "tool_calls")
    made = [
        [call.function.name, call.function.arguments]
        for call in whole.message.tool_calls or ()
        if call.type == "function"
    ]
    assert [(tool, json.loads(given)) for tool, given in made] == [
        ("weather", {"city": "Oslo", "days": [1, 2]}),
        ("now", {}),
    ]
    texts = {"content": content or "", "reasoning_content": ""}
    assert streamed(client, **asked) == (texts, made, "tool_calls")


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
