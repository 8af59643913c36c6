"""Chat templates, and reasoning in prompts and replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batching.errors import InvalidParameter, UnsupportedModel
from batching.llama.context import ContextParams
from batching.llama.model import Model
from speculation import sandbox
from speculation.chat.reasoning import answer_of, find_reasoning, opening_of
from speculation.chat.template import (
    asks_for_thinking,
    chat_prompt,
    chat_text,
    render_messages,
    template_of,
)
from speculation.chat.tool_format import GENERIC, tool_format
from speculation.engine import Engine
from speculation.sandbox import Sandbox
from tests.speculation.chat.tool_templates import FAMILIES
from tests.support.tiny_gguf import write_tiny_gguf

# Like Qwen 3's: the model thinks unless it is told not to.
THINKS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}"
)
# Like DeepSeek R1's: the model always thinks, and the template opens the reasoning.
OPENS = THINKS.partition("{% if")[0] + "{{ '<think>\\n' }}"
# Like Qwen 2.5's, with arguments as an object, and a system message of its own.
CALLS = (
    "{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": "<"}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": None}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM, RESULT = [
    {"role": role, "content": text} for role, text in (("developer", "s"), ("tool", "3"))
]
CALL_MESSAGES = [SYSTEM, user("a"), assistant(tool_calls=[CALL]), {**RESULT, "tool_call_id": "1"}]
MESSAGES = [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")]


def engine_with(template: str, path: Path) -> Engine:
    model = write_tiny_gguf(path, chat_template=template)
    return Engine.load(model, ContextParams(n_ctx=512, flash_attn="off"))


class Engines(NamedTuple):
    thinks: Engine
    opens: Engine
    calls: Engine
    channels: Engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("models")
    channels = THINKS.partition("{% if")[0] + "{# <|channel|>analysis<|message|> #}"
    named = zip(Engines._fields, (THINKS, OPENS, CALLS, channels), strict=True)
    with ExitStack() as stack:
        yield Engines(
            *(
                stack.enter_context(engine_with(text, folder / f"{name}.gguf"))
                for name, text in named
            )
        )


def prompt_text(engine: Engine, messages: list[Any], thinking: bool | None = None) -> str:
    tokens = chat_prompt(engine.model, messages, thinking=thinking).tokens
    return engine.model.detokenize(tokens).decode()


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "opening", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "", "hm\n", "yes"),
        ("\n<think>hm</think>yes", "", "hm", "yes"),
        ("<think></think>yes", "", "", "yes"),
        ("hm</think>yes", "<think>\n", "hm", "yes"),
        ("<seed:think>hm</seed:think>yes", "", "hm", "yes"),
        ("<think:opensource>hm</think:opensource>yes", "", "hm", "yes"),
        ("[THINK]hm[/THINK]yes", "", "hm", "yes"),
        ("<|channel>thought\nhm<channel|>yes", "", "hm", "yes"),
        (f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}yes", "", "hm", "yes"),
        (f"{FINAL}yes", "", "", "yes"),
        ("<think>a <think> b</think>yes</think>", "", "a <think> b", "yes</think>"),
        *((text, "", None, text) for text in ("yes", "", "I say <think>hm</think>", "<thinker>")),
        ("<b>yes</b>", "", None, "<b>yes</b>"),
        ("<think>\nhm", "", "hm", "<think>\nhm"),  # not finished
        ("hm", "<think>", "hm", "hm"),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    text: str, opening: str, reasoning: str | None, answer: str
) -> None:
    found = find_reasoning(text, opening)
    assert (text[found.start : found.end] if found else None) == reasoning
    assert not found or text[found.answer :] in (answer, "")
    assert answer_of(text, opening) == answer


def test_reasoning_is_recorded_and_left_out_later(engines: Engines) -> None:
    for engine in (engines.thinks, engines.opens):
        assert "<|assistant|>b<|end|><|user|>c" in prompt_text(engine, MESSAGES)
    opened = [user("a"), assistant("hm\n</think>\n\nb"), user("c")]
    assert "<|assistant|>b<|end|>" in prompt_text(engines.opens, opened)
    assert opening_of("a<|assistant|><think>\n") == "<think>\n"
    assert opening_of("a<|assistant|><think>\n\n</think>\n\n") == ""
    assert opening_of("a<|assistant|>") == ""
    reply = engines.opens.chat("a", max_tokens=3).run()
    assert reply.request.opening == "<think>\n"
    assert reply.answer == reply.text  # the reasoning is not finished
    assert engines.thinks.chat("a", max_tokens=3).run().request.opening == ""


def test_a_continued_reply_keeps_its_reasoning(engines: Engines) -> None:
    for name, content, reasoning, end, opening in (
        ("opens", "<think>hm", "", "<think>\nhm", "<think>\n"),
        ("opens", "", "hm", "<think>\nhm", "<think>\n"),
        ("opens", "", "", "<think>\n", "<think>\n"),
        ("opens", "hm</think>yes", "", "<think>\nhm</think>yes", ""),
        ("opens", "yes", "", "<think>\n\n</think>\n\nyes", ""),
        ("opens", "yes", "hm", "<think>\nhm\n</think>\n\nyes", ""),
        ("thinks", "<think>\nhm", "", "<think>\nhm", "<think>\n"),
        ("thinks", "", "hm", "<think>\nhm", "<think>\n"),
        ("thinks", "yes", "hm", "<think>\nhm\n</think>\n\nyes", ""),
        ("thinks", "yes", "", "yes", ""),
        ("off", "yes", "hm", "<think></think>yes", ""),
        ("channels", "yes", "", "<|channel|>final<|message|>yes", ""),
        ("channels", "<|channel|>final<|message|>yes", "", "<|channel|>final<|message|>yes", ""),
    ):
        thinking = False if name == "off" else None
        model = getattr(engines, "thinks" if name == "off" else name).model
        prompt = chat_prompt(
            model, [user("a"), assistant(content, reasoning_content=reasoning)], thinking=thinking
        )
        text = model.detokenize(prompt.tokens).decode()
        assert text.endswith(f"<|user|>a<|end|><|assistant|>{end}")
        assert prompt.opening == opening
        assert prompt.in_answer is (content.endswith("yes"))


def test_thinking_can_be_switched_if_the_template_can(engines: Engines) -> None:
    engine = engines.thinks
    assert engine.has_thinking_switch
    for thinking, end in ((None, ""), (True, ""), (False, "<think></think>")):
        text = prompt_text(engine, MESSAGES[:1], thinking=thinking)
        assert text.endswith(f"<|assistant|>{end}")
    engine = engines.opens
    assert not engine.has_thinking_switch
    with pytest.raises(InvalidParameter, match="reasoning cannot be turned on or off"):
        engine.chat("a", thinking=False)


def test_calls_are_shown_in_the_form_that_the_template_expects(engines: Engines) -> None:
    model = engines.calls.model
    text = chat_text(model, CALL_MESSAGES, tools=[TOOL])
    assert text == (
        '{"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}'
        '<|system|>s<|end|><|user|>a<|end|><|assistant|><call>add{"x": "<"}<|end|><|tool|>3<|end|>'
        "<|assistant|>"
    )
    tokens = chat_prompt(model, CALL_MESSAGES, tools=[TOOL]).tokens
    assert tokens == model.tokenize(text, parse_special=True)
    for template, text in (
        ("{{ call.function.arguments }}", '{"x": "<"}'),
        ("{{ 'f' + call.function.arguments + ';' }}", 'f{"x": "<"};'),
        ("{{ call.function.arguments.x }}", "<"),
        ("{{ call.id }}", "1"),
        ("{% if call.id | length != 9 %}{{ raise_exception('') }}{% endif %}", ""),
    ):
        calls = f"{{% for call in m.tool_calls %}}{{{{ tools }}}}{template}{{% endfor %}}"
        loop = f"{{% for m in messages %}}{calls}{{% endfor %}}"
        assert render_messages(loop, CALL_MESSAGES) == text
    for arguments, expected in (
        ({"x": 1}, '{"x": 1}'),
        ('{"x": "a", "y": [1', '{"x": "a", "y": [1]}'),
        ("[1]", '{"arguments": [1]}'),
        (None, "{}"),
    ):
        call = {"id": "1", "function": {"name": "add", "arguments": arguments}}
        text = chat_text(model, [user("a"), assistant(tool_calls=[call])])
        assert f"<call>add{expected}<|end|>" in text
    for bad in ({"id": "1"}, {"function": {"arguments": "{}"}}, 3):
        with pytest.raises(InvalidParameter, match=r"invalid tool call .*; each needs a function"):
            chat_prompt(model, [user("a"), assistant(tool_calls=[bad])])


def test_control_tokens_in_calls_and_tools_stay_text(engines: Engines) -> None:
    model, quoted = engines.calls.model, '<|end|>"\n'
    function = {"name": "add", "arguments": json.dumps({"x": quoted, quoted: 1})}
    call = assistant(tool_calls=[{"id": "1", "function": function}])
    messages = [user("a"), call, {**CALL_MESSAGES[3], "content": quoted}]
    tools = [{"type": "function", "function": {"name": "add", "description": quoted}}]
    tokens = chat_prompt(model, messages, tools=tools).tokens
    (end,) = model.tokenize("<|end|>", add_special=False, parse_special=True)
    assert tokens.count(end) == 3
    text = model.detokenize(tokens).decode().replace(" ", "")
    assert text.endswith(chat_text(model, messages, tools=tools).replace(" ", ""))
    assert r'{"x":"<|end|>\"\n","<|end|>\"\n":1}' in text


def test_tools_are_described_if_the_template_has_none(engines: Engines) -> None:
    model = engines.thinks.model
    text = chat_text(model, [*CALL_MESSAGES, CALL_MESSAGES[3]], tools=[TOOL])
    call = '<tool_call>\n{"name": "add", "arguments": {"x": "<"}}\n</tool_call>'
    result = "<tool_response>\n3\n</tool_response>"
    assert text.endswith(
        f"<|end|><|user|>a<|end|><|assistant|>{call}<|end|><|user|>{result}\n\n{result}<|end|>"
        "<|assistant|>"
    )
    assert text.startswith("<|system|>s\n\nYou can call tools. To call one, ")
    assert '{"name": "add", "description": "", "parameters": {"type": "object", "prop' in text
    tokens = chat_prompt(model, [*CALL_MESSAGES, CALL_MESSAGES[3]], tools=[TOOL]).tokens
    assert tokens == model.tokenize(text, parse_special=True)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([assistant("b"), assistant(tool_calls=[CALL])],
         '<|assistant|>b<call>add{"x": "<"}<|end|>'),
        ([assistant("b"), assistant("c")], "<|assistant|>b\n\nc<|end|>"),
        ([assistant(refusal="No.")], "<|assistant|>No.<|end|>"),
        ([assistant()], "<|assistant|><|end|>"),
        ([assistant(function_call=CALL["function"]), {**RESULT, "role": "function", "name": "add"}],
         '<|assistant|><call>add{"x": "<"}<|end|><|tool|>3<|end|>'),
    ],
)  # fmt: skip
def test_histories_are_taken_as_clients_send_them(
    engines: Engines, messages: list[Any], text: str
) -> None:
    found = chat_text(engines.calls.model, [user("a"), *messages, user("c")])
    assert found == f"<|user|>a<|end|>{text}<|user|>c<|end|><|assistant|>"


# Like Mistral's and Gemma's: one system message, or none, then user and assistant in turn.
STRICT = (
    "{% set rest = messages[1:] if messages[0].role == 'system' and SYSTEM else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("system", "text"),
    [("true", "s:s\n\nt\n\nu;u:a;a:b;u:c\n\nd;"), ("false", "u:s\n\nt\n\nu\n\na;a:b;u:c\n\nd;")],
)
def test_a_strict_template_gets_a_form_it_accepts(tmp_path: Path, system: str, text: str) -> None:
    path = write_tiny_gguf(tmp_path / "strict.gguf", chat_template=STRICT.replace("SYSTEM", system))
    roles = {"s": "system", "t": "developer", "a": "user", "b": "assistant", "u": "system"}
    messages = [{"role": roles.get(c, "user"), "content": c} for c in "stabucd"]
    with Model(path) as model:
        assert chat_text(model, messages) == text
        with pytest.raises(InvalidParameter, match="roles must alternate"):
            chat_text(model, [messages[3], messages[5]])


def test_the_reasoning_of_earlier_turns_reaches_the_template(tmp_path: Path) -> None:
    for read in ("reasoning_content", "reasoning", "thinking"):
        template = f"{{% for m in messages %}}({{{{ m.{read} }}}}){{{{ m.content }}}}{{% endfor %}}"
        path = write_tiny_gguf(tmp_path / f"{read}.gguf", chat_template=template)
        with Model(path) as model:
            assert chat_text(model, MESSAGES) == "()a(hm)b()c"
            apart = [user("a"), assistant("b", reasoning_content="so"), user("c")]
            assert chat_text(model, apart) == "()a(so)b()c"


def test_a_gguf_may_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "two.gguf",
        chat_template=THINKS,
        more=lambda writer: writer.add_string("tokenizer.chat_template.tool_use", CALLS),
    )
    with Model(path) as model:
        assert (template_of(model), template_of(model, tools=True)) == (THINKS, CALLS)
        assert chat_text(model, MESSAGES[:1], tools=[TOOL]).startswith('{"name": "add"')


def test_a_reply_is_continued_unless_told_otherwise(engines: Engines) -> None:
    model, begun = engines.calls.model, [user("a"), assistant("b")]
    for continue_last, end in ((None, "b"), (True, "b"), (False, "b<|end|><|assistant|>")):
        text = chat_text(model, begun, continue_last=continue_last)
        assert text == f"<|user|>a<|end|><|assistant|>{end}"
    assert chat_text(model, CALL_MESSAGES[1:3]).endswith('add{"x": "<"}<|end|><|assistant|>')
    for messages in (MESSAGES[:1], CALL_MESSAGES[1:3]):
        with pytest.raises(InvalidParameter, match="the last message is not the assistant's"):
            chat_text(model, messages, continue_last=True)


def test_templates_get_variables_and_the_date_and_errors_are_quoted(engines: Engines) -> None:
    template = "{{ tone }}{{ date_string }}"
    given = {"tone": "dry", "date_string": "today"}
    assert render_messages(template, MESSAGES, template_kwargs=given) == "drytoday"
    with pytest.raises(InvalidParameter, match="template_kwargs cannot replace tools"):
        chat_text(engines.calls.model, MESSAGES, template_kwargs={"tools": []})
    today = datetime.now().strftime("%d %b %Y")
    for template, expected in (
        ("{% generation %}{% set x = 'a' %}{{ x }}{% endgeneration %}b", "ab"),
        ("{% if date_string is defined %}{{ date_string }}{% else %}26 Jul 2024{% endif %}", today),
    ):
        assert render_messages(template, MESSAGES) == expected
    for template, reason in (
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | nonsense }}", "No filter named 'nonsense'"),
    ):
        with pytest.raises(InvalidParameter, match=f"chat template rejects .*: {reason}"):
            render_messages(template, MESSAGES)


COMPILES = "{{ 10 ** (10 ** 9) }}"  # evaluated during compilation
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set made = namespace(text='ab') %}"
    "{% for i in range(40) %}{% set made.text = made.text ~ made.text %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "limit", "value", "reason"),
    [
        (LOOPS, "SECONDS", 0.2, "took longer than 0.2 s"),
        (COMPILES, "SECONDS", 0.2, "took longer than 0.2 s"),
        (DOUBLES, "MEMORY", 1 << 28, "needed more than 256 MiB of memory"),
        ("{% for i in range(999) %}ab{% endfor %}", "CHARACTERS", 999, "made more than 1,009 char"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_stopped_and_the_next_one_renders(
    monkeypatch: pytest.MonkeyPatch, template: str, limit: str, value: float, reason: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sandbox, limit, value)
        with pytest.raises(UnsupportedModel, match=f"chat template {reason}.* choose another"):
            render_messages(template, MESSAGES[:1])
    assert render_messages("{{ messages[0].content }}", MESSAGES) == "a"


def test_a_slow_template_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% if messages[0].role == 'system' %}" + LOOPS + "{% endif %}a"
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    with (
        engine_with(loops, tmp_path / "loops.gguf") as engine,
        pytest.raises(UnsupportedModel, match="took longer than 0.2 s"),
    ):  # not even without the system message
        chat_prompt(engine.model, [{"role": "system", "content": "s"}, *MESSAGES])
    for template in (None, "{% if enable_thinking %}", "{{ thinking }}" + COMPILES):
        assert not asks_for_thinking(template)


def test_renders_are_apart_and_the_sandbox_ends_with_its_parent() -> None:
    def render(i: int) -> str:
        return render_messages("{{ messages[0].content }}", [{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(render, range(40))) == [str(i) for i in range(40)]
    boxes = Sandbox()
    assert boxes.render("{{ a }}", {"a": "\ud800ä"}, 0) == "\ud800ä"
    process = boxes._idle[0]._process
    assert process.stdin is not None
    process.stdin.close()  # as when the parent ends
    assert process.wait(60) == 0
    assert boxes.render("{{ a }}", {"a": "b"}, 0) == "b"
    boxes.close()
    assert not boxes._idle


def test_a_template_that_once_took_too_long_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = FAMILIES["json between marks"].template + "{# slow #}"
    thinks = OPENS + "{# enable_thinking #}"
    with monkeypatch.context() as slow:
        slow.setattr(sandbox, "SECONDS", 0.0)
        assert tool_format(calls) == GENERIC
        assert asks_for_thinking(thinks)
    assert len(caplog.messages) == 2 and "took longer than 0 s" in caplog.text
    assert tool_format(calls).in_template
    assert not asks_for_thinking(thinks)
