"""Chat templates, and reasoning in prompts and replies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from batching.errors import InvalidParameter, UnsupportedModel
from batching.llama.context import ContextParams
from speculation.chat import render_process
from speculation.chat.reasoning import answer_of, find_reasoning, opening_of
from speculation.chat.render_process import RenderProcess
from speculation.chat.template import asks_for_thinking, chat_prompt, render_messages
from speculation.engine import Engine
from tests.support.tiny_gguf import write_tiny_gguf

# Like Qwen 3's: the model thinks unless it is told not to.
THINKS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}"
)
# Like DeepSeek R1's: the model always thinks, and the template opens the reasoning.
OPENS = THINKS.partition("{% if")[0] + "{{ '<think>\\n' }}"
MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
    {"role": "user", "content": "c"},
]


def engine_with(template: str, path: Path) -> Engine:
    model = write_tiny_gguf(path, chat_template=template)
    return Engine.load(model, ContextParams(n_ctx=512, flash_attn="off"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        name: engine_with(template, folder / f"{name}.gguf")
        for name, template in (("thinks", THINKS), ("opens", OPENS))
    }
    yield made
    for engine in made.values():
        engine.close()


def prompt_text(
    engine: Engine, messages: list[dict[str, str]], thinking: bool | None = None
) -> str:
    tokens = chat_prompt(engine.model, messages, thinking=thinking).tokens
    return engine.model.detokenize(tokens).decode()


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
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
            "",
            "hm",
            "yes",
        ),
        ("<|channel|>final<|message|>yes", "", "", "yes"),
        ("<think>a <think> b</think>yes</think>", "", "a <think> b", "yes</think>"),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    text: str, opening: str, reasoning: str, answer: str
) -> None:
    found = find_reasoning(text, opening)
    assert found is not None
    assert text[found.start : found.end] == reasoning
    assert text[found.answer :] == answer
    assert answer_of(text, opening) == answer


@pytest.mark.parametrize("text", ["yes", "", "I say <think>hm</think>", "<b>yes</b>", "<thinker>"])
def test_a_reply_without_reasoning_is_all_answer(text: str) -> None:
    assert find_reasoning(text) is None
    assert answer_of(text) == text


def test_unfinished_reasoning_extends_to_the_end() -> None:
    assert find_reasoning("<think>\nhm") == (8, 10, 10)
    assert find_reasoning("hm", "<think>") == (0, 2, 2)
    assert answer_of("<think>hm") == "<think>hm"


def test_the_prompt_shows_whether_the_reply_starts_with_reasoning() -> None:
    assert opening_of("a<|assistant|><think>\n") == "<think>\n"
    assert opening_of("a<|assistant|><think>\n\n</think>\n\n") == ""
    assert opening_of("a<|assistant|>") == ""


def test_reasoning_of_earlier_replies_is_left_out(engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        assert "<|assistant|>b<|end|><|user|>c" in prompt_text(engine, MESSAGES)
    opened = [MESSAGES[0], {"role": "assistant", "content": "hm\n</think>\n\nb"}, MESSAGES[2]]
    assert "<|assistant|>b<|end|>" in prompt_text(engines["opens"], opened)


def test_a_continued_reply_keeps_its_reasoning(engines: dict[str, Engine]) -> None:
    text = prompt_text(engines["opens"], [MESSAGES[0], {"role": "assistant", "content": "hm"}])
    assert text.endswith("<|user|>a<|end|><|assistant|><think>\nhm")


def test_the_start_of_a_reply_shows_whether_it_continues_in_reasoning(
    engines: dict[str, Engine],
) -> None:
    for name, start, opening in (
        ("opens", "hm", "<think>\n"),
        ("opens", "hm</think>yes", ""),
        ("thinks", "<think>\nhm", "<think>\n"),
        ("thinks", "yes", ""),
    ):
        messages = [MESSAGES[0], {"role": "assistant", "content": start}]
        assert chat_prompt(engines[name].model, messages).opening == opening


def test_thinking_can_be_turned_on_and_off(engines: dict[str, Engine]) -> None:
    engine = engines["thinks"]
    assert engine.can_be_told_to_think
    assert prompt_text(engine, MESSAGES[:1]).endswith("<|assistant|>")
    assert prompt_text(engine, MESSAGES[:1], thinking=True).endswith("<|assistant|>")
    assert prompt_text(engine, MESSAGES[:1], thinking=False).endswith(
        "<|assistant|><think></think>"
    )


def test_a_model_without_a_thinking_switch_refuses_the_setting(engines: dict[str, Engine]) -> None:
    engine = engines["opens"]
    assert not engine.can_be_told_to_think
    with pytest.raises(InvalidParameter, match="reasoning cannot be turned on or off"):
        engine.chat("a", thinking=False)


def test_reasoning_opened_by_the_prompt_is_recorded_with_the_reply(
    engines: dict[str, Engine],
) -> None:
    reply = engines["opens"].chat("a", max_tokens=3).run()
    assert reply.opening == "<think>\n"
    assert reply.answer == reply.text  # the reasoning is not finished
    assert engines["thinks"].chat("a", max_tokens=3).run().opening == ""


def test_a_template_may_mark_the_trained_tokens() -> None:
    template = "{% generation %}{% set x = 'a' %}{{ x }}{% endgeneration %}b"
    assert render_messages(template, MESSAGES) == "ab"


def test_a_template_that_shows_the_date_shows_todays() -> None:
    template = "{% if date_string is defined %}{{ date_string }}{% else %}26 Jul 2024{% endif %}"
    assert render_messages(template, MESSAGES) == datetime.now().strftime("%d %b %Y")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | nonsense }}", "No filter named 'nonsense'"),
    ],
)
def test_a_template_error_is_quoted(template: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=f"chat template rejects .*: {reason}"):
        render_messages(template, MESSAGES)


def test_a_broken_template_has_no_thinking_switch() -> None:
    assert not asks_for_thinking("{% if enable_thinking %}")
    assert not asks_for_thinking(None)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set made = namespace(text='ab') %}"
    "{% for i in range(40) %}{% set made.text = made.text ~ made.text %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "limit", "value", "reason"),
    [
        (LOOPS, "SECONDS", 0.2, "took longer than 0.2 s"),
        (
            "{{ 10 ** (10 ** 9) }}",
            "SECONDS",
            0.2,
            "took longer than 0.2 s",
        ),  # evaluated during compilation
        (DOUBLES, "MEMORY", 1 << 28, "needed more than 256 MiB of memory"),
        ("{% for i in range(999) %}ab{% endfor %}", "CHARACTERS", 999, "made more than 1,009 char"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_stopped_and_the_next_one_renders(
    monkeypatch: pytest.MonkeyPatch, template: str, limit: str, value: float, reason: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(render_process, limit, value)
        with pytest.raises(UnsupportedModel, match=f"chat template {reason}.* choose another"):
            render_messages(template, MESSAGES[:1])
    assert render_messages("{{ messages[0].content }}", MESSAGES) == "a"


def test_a_template_that_exceeds_a_limit_is_not_retried_without_the_system_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = "{% if messages[0].role == 'system' %}" + LOOPS + "{% endif %}a"
    monkeypatch.setattr(render_process, "SECONDS", 0.2)
    with (
        engine_with(loops, tmp_path / "loops.gguf") as engine,
        pytest.raises(UnsupportedModel, match="took longer than 0.2 s"),
    ):
        chat_prompt(engine.model, [{"role": "system", "content": "s"}, *MESSAGES])


def test_a_template_that_cannot_be_compiled_in_time_has_no_thinking_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render_process, "SECONDS", 0.2)
    assert not asks_for_thinking("{{ thinking }}{{ 10 ** (10 ** 9) }}")


def test_concurrent_renders_get_their_own_results() -> None:
    def render(i: int) -> str:
        return render_messages("{{ messages[0].content }}", [{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(render, range(40))) == [str(i) for i in range(40)]


def test_the_render_process_ends_with_its_parent_and_is_restarted() -> None:
    renderer = RenderProcess()
    assert renderer.render("{{ a }}", {"a": "\ud800ä"}, 0) == "\ud800ä"
    process = renderer._process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as when the parent ends
    assert process.wait(60) == 0
    assert renderer.render("{{ a }}", {"a": "b"}, 0) == "b"
    renderer.close()
    assert renderer._process is None
