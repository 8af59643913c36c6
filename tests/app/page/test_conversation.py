"""Conversations without a browser or a model: what is asked, told, compared and exported."""

from __future__ import annotations

import dataclasses

from app.page.conversation import (
    Conversation,
    PlainRun,
    Reply,
    Settings,
    Turn,
    follow,
    markdown,
    stats_line,
)
from app.worker.messages import Done, Event, Failed, Opening, Prefill, Text, Waiting
from tests.support.fake_backend import DONE, FakeBackend, run, talk


def test_messages_hold_the_system_prompt_and_all_turns() -> None:
    conversation = talk("one")
    conversation.ask("two")
    assert conversation.messages(" Be brief. ") == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "re: one"},
        {"role": "user", "content": "two"},
    )


def test_a_turn_that_failed_is_not_told_to_the_model() -> None:
    conversation = Conversation()
    conversation.ask("one")
    assert run(conversation, FakeBackend([Failed("no model")])).error == "no model"
    conversation.ask("two")
    assert conversation.messages() == ({"role": "user", "content": "two"},)


def test_undo_gives_the_last_message_back() -> None:
    conversation = talk("one", "two")
    assert conversation.undo().user == "two"
    assert [turn.user for turn in conversation.turns] == ["one"]
    conversation.undo()
    assert conversation.undo().user == ""


def test_retry_and_edit_drop_what_follows() -> None:
    conversation = talk("one", "two", "three")
    conversation.retry(1)
    assert conversation.turns == [conversation.turns[0], Turn("two")]
    conversation.edit(0, "uno")
    assert conversation.turns == [Turn("uno")]


def test_a_reply_that_was_cut_short_is_gone_on_with() -> None:
    conversation = Conversation()
    conversation.ask("count")
    cut = dataclasses.replace(DONE, finish_reason="length")
    run(conversation, FakeBackend([Text((("one ", False), ("two ", True))), cut]))
    assert conversation.turns[0].reply is not None
    assert conversation.turns[0].reply.is_cut_short
    conversation.go_on()
    assert "one two " in markdown(conversation)
    plain = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)
    backend = FakeBackend([Text((("three", True),)), DONE], [Text((("three", False),)), plain])
    reply = run(conversation, backend, compare=True)
    assert backend.requests[0].messages == (
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two "},
    )
    assert reply.pieces == [("one ", False), ("two ", True), ("three", True)]
    assert "2.0× plain, same text" in stats_line(reply)
    assert not reply.is_cut_short
    assert conversation.turns == [Turn("count", reply)]


def test_half_a_character_is_not_gone_on_with() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    cut = dataclasses.replace(DONE, finish_reason="length")
    run(conversation, FakeBackend([Text((("ab\ufffd", False),)), cut]))
    conversation.go_on()
    assert conversation.messages()[-1] == {"role": "assistant", "content": "ab"}


def test_a_reply_tells_of_waiting_and_of_the_prompt_and_then_shows_text() -> None:
    conversation, seen = Conversation(), []
    conversation.ask("hi")
    events: list[Event] = [Waiting(1), Waiting(2), Waiting(1, loading=True), Prefill(512, 900)]
    backend = FakeBackend([*events, Text((("yes", True),)), DONE])
    for _ in conversation.answer(backend, Settings(), "tab"):
        reply = conversation.turns[-1].reply
        assert reply is not None
        seen.append(reply.notice or reply.text)
    assert list(dict.fromkeys(seen)) == [
        "",
        "Waiting: 1 reply before yours",
        "Waiting: 2 replies before yours",
        "Waiting: a model is being loaded",
        "Reading the prompt: 512 of 900 tokens",
        "yes",
    ]


def test_text_is_gathered_between_updates() -> None:
    now = iter(range(0, 100_000, 1))
    text: list[str] = []

    def apply(event: Event) -> None:
        assert isinstance(event, Text)
        text.extend(piece for piece, _ in event.pieces)

    events = (Text(((letter, False),)) for letter in "abcdefgh")
    seen = ["".join(text) for _ in follow(events, apply, lambda: next(now) / 100)]
    assert seen == ["a", "abcdefg", "abcdefgh"]


def test_comparing_runs_the_same_request_by_plain_decoding() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    plain = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)
    backend = FakeBackend([Text((("yes", True),)), DONE], [Text((("yes", False),)), plain])
    reply = run(conversation, backend, sampling={"seed": 7}, compare=True)
    assert [request.method for request in backend.requests] == ["prompt-lookup", "ar"]
    assert backend.requests[1].sampling == {"seed": 7}
    assert backend.requests[1].max_tokens == 84
    assert reply.plain == PlainRun(40.0, "yes", 80, 2.0)
    assert stats_line(reply).startswith("80 tok/s · 2.0× plain, same text · ")


def test_a_plain_reply_is_what_a_retry_is_compared_with() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    plain = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)
    run(conversation, FakeBackend([Text((("yes", False),)), plain]), method="ar")
    conversation.retry(0)
    reply = run(conversation, FakeBackend([Text((("yes!", False),)), DONE]))
    assert "2.0× plain, other text" in stats_line(reply)


def test_comparing_measures_again_what_was_measured_before() -> None:
    conversation = Conversation()
    for seconds, ratio in ((2.0, "2.0"), (3.0, "3.0")):
        conversation.ask("hi")
        plain = dataclasses.replace(DONE, method="ar", decode_seconds=seconds)
        backend = FakeBackend([Text((("yes", True),)), DONE], [Text((("yes", False),)), plain])
        assert f"{ratio}× plain" in stats_line(run(conversation, backend, compare=True))
        conversation.undo()


def test_the_speed_of_a_few_tokens_is_not_compared() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    few = dataclasses.replace(DONE, n_tokens=8, n_first=1)
    run(conversation, FakeBackend([dataclasses.replace(few, method="ar")]), method="ar")
    assert not conversation.plain_runs
    conversation.retry(0)
    backend = FakeBackend([few])
    assert "plain" not in stats_line(run(conversation, backend, compare=True))
    assert len(backend.requests) == 1


def test_a_ratio_is_shown_only_where_both_runs_were_timed_for_long() -> None:
    long = dataclasses.replace(DONE, n_tokens=65, n_first=1, decode_seconds=0.5)
    reply = Reply("x", done=long, plain=PlainRun(64.0, "", 64, 1.0))
    assert "2.0× plain, same text" in stats_line(reply)
    for n_tokens, seconds, plain, told in (
        (35, 0.09, (34, 0.21), "34 tokens in 0.09 s, plain 34 in 0.21 s: too short to compare"),
        (64, 0.60, (64, 2.00), "63 tokens in 0.60 s, plain 64 in 2.00 s: too short to compare"),
        (65, 0.49, (64, 2.00), "64 tokens in 0.49 s, plain 64 in 2.00 s: too short to compare"),
        (65, 0.60, (63, 2.00), "64 tokens in 0.60 s, plain 63 in 2.00 s: too short to compare"),
        (65, 0.60, (64, 0.49), "64 tokens in 0.60 s, plain 64 in 0.49 s: too short to compare"),
    ):
        reply.done = dataclasses.replace(long, n_tokens=n_tokens, decode_seconds=seconds)
        reply.plain = PlainRun(plain[0] / plain[1], "", *plain)
        assert f" · {told} · " in stats_line(reply)


def test_nothing_is_compared_that_was_not_measured() -> None:
    stopped = dataclasses.replace(DONE, method="ar", finish_reason="cancelled")
    for second in ([stopped], [Failed("no")]):
        conversation = Conversation()
        conversation.ask("hi")
        reply = run(conversation, FakeBackend([DONE], second), compare=True)
        assert "plain" not in stats_line(reply)
        assert not conversation.plain_runs


def test_the_stats_line_says_what_a_reply_cost() -> None:
    reply = Reply("prompt-lookup", done=DONE)
    assert stats_line(reply) == (
        "80 tok/s · 2.1 tokens per step · 41 % accepted · first token 0.25 s · context 312 / 2048"
    )
    short = dataclasses.replace(DONE, n_tokens=1, n_first=1, n_steps=1, decode_seconds=0.0)
    assert stats_line(Reply("ar", done=short)).startswith("1.0 tokens per step · ")
    slow = dataclasses.replace(DONE, decode_seconds=20.0, n_drafted=0, finish_reason="length")
    assert stats_line(Reply("ar", done=slow)) == (
        "4.0 tok/s · 2.1 tokens per step · first token 0.25 s · context 312 / 2048 · length limit"
    )
    full = dataclasses.replace(DONE, n_prompt=1965, n_drafted=0, finish_reason="context")
    assert stats_line(Reply("ar", done=full)).endswith(" · context 2048 / 2048 · context full")
    assert stats_line(Reply("ar", done=Done("cancelled"))) == "stopped"
    assert stats_line(Reply("ar")) == ""
    assert stats_line(Reply("ar", [("a", True), ("b", False)])) == "2 tokens · 1 drafted"


def test_a_conversation_can_be_exported() -> None:
    assert markdown(talk("one")) == (
        "## You\n\none\n\n## Model\n\nre: one\n\n<sub>m.gguf · prompt-lookup · 80 tok/s · "
        "2.1 tokens per step · 41 % accepted · first token 0.25 s · "
        "context 312 / 2048</sub>\n"
    )


def test_an_exported_reply_ends_its_code_and_folds_its_reasoning() -> None:
    conversation = talk("one")
    for text, exported in (
        ("```py\nx = 1", "```py\nx = 1\n```"),
        ("~~~~\n```\n~~~~", "~~~~\n```\n~~~~"),
        ("```\na\n```\n```b", "```\na\n```\n```b\n```"),
        (
            "<think>hm</think>\n\nyes",
            "<details><summary>Reasoning</summary>\n\nhm\n\n</details>\n\nyes",
        ),
    ):
        conversation.turns[0].reply = Reply("ar", [(text, False)])
        assert f"## Model\n\n{exported}\n\n<sub>ar" in markdown(conversation)


def test_reasoning_is_left_out_of_what_the_model_reads_next() -> None:
    conversation = talk("one", "two")
    for turn, opening in zip(conversation.turns, ("", "<think>\n"), strict=True):
        text = "hm</think>yes" if opening else "<think>hm</think>yes"
        turn.reply = Reply("ar", [(text, False)], opening=opening)
    conversation.ask("three")
    said = [message["content"] for message in conversation.messages()]
    assert said == ["one", "yes", "two", "yes", "three"]


def test_what_the_prompt_opened_is_known_to_the_reply_and_to_one_that_goes_on() -> None:
    conversation = Conversation()
    conversation.ask("one")
    cut = dataclasses.replace(DONE, finish_reason="length")
    reply = run(conversation, FakeBackend([Opening("<think>"), Text((("hm", False),)), cut]))
    assert reply.reasoning == (0, 2, 2)
    conversation.go_on()
    rest = run(conversation, FakeBackend([Text((("</think>yes", False),)), DONE]))
    assert rest.answer == "yes"


def test_code_that_is_open_in_reasoning_or_in_the_answer_ends_there() -> None:
    conversation = talk("one")
    reply = Reply("ar", [("```\na</think>\n```\nb", False)], opening="<think>")
    conversation.turns[0].reply = reply
    assert "\n\n```\na\n```\n\n</details>\n\n```\nb\n```\n\n<sub>" in markdown(conversation)


def test_a_reply_that_goes_on_is_told_to_think_or_not_as_before() -> None:
    conversation = Conversation()
    conversation.ask("one")
    cut = dataclasses.replace(DONE, finish_reason="length")
    run(conversation, FakeBackend([Opening("<think>"), Text((("hm", False),)), cut]), thinking=True)
    conversation.go_on()
    backend = FakeBackend([Opening("<think>\n"), Text((("</think>yes", False),)), DONE])
    rest = run(conversation, backend, thinking=False)
    assert backend.requests[0].thinking is True
    assert (rest.opening, rest.answer) == ("<think>", "yes")
