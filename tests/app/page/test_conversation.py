"""Conversations without a browser or model: prompts, replies, comparison and export."""

from __future__ import annotations

import dataclasses

import pytest

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
from app.worker.messages import Done, Event, Failed, Opening, Prefill, Tokens, Waiting
from tests.support.fake_backend import DONE, FakeBackend, run, talk

CUT = dataclasses.replace(DONE, finish_reason="length")
PLAIN = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)


def asked(text: str) -> Conversation:
    """A conversation whose first message has no reply yet."""
    conversation = Conversation()
    conversation.ask(text)
    return conversation


def said(text: str, done: Done = DONE) -> list[Event]:
    """The events of a reply of one token."""
    return [Tokens(((text, False),)), done]


def test_messages_hold_the_system_prompt_and_all_turns_but_failed_ones() -> None:
    conversation = talk("one")
    conversation.ask("failed")
    assert run(conversation, FakeBackend([Failed("no model")])).error == "no model"
    conversation.ask("two")
    assert conversation.messages(" Be brief. ") == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "re: one"},
        {"role": "user", "content": "two"},
    )
    assert conversation.messages()[0] == {"role": "user", "content": "one"}


def test_retry_and_edit_drop_what_follows_and_undo_returns_the_last_message() -> None:
    conversation = talk("one", "two", "three")
    conversation.retry(1)
    assert conversation.turns == [conversation.turns[0], Turn("two")]
    assert conversation.undo().user == "two"
    conversation.edit(0, "uno")
    assert conversation.turns == [Turn("uno")]
    assert [conversation.undo().user for _ in range(2)] == ["uno", ""]


def test_a_reply_that_was_cut_short_can_be_continued() -> None:
    conversation = asked("count")
    # Half of the last character is missing, and is dropped.
    run(conversation, FakeBackend([Tokens((("one ", False), ("two \ufffd", True))), CUT]))
    assert conversation.turns[0].reply is not None
    assert conversation.turns[0].reply.is_cut_short
    conversation.continue_reply()
    assert "one two " in markdown(conversation)
    backend = FakeBackend([Tokens((("three", True),)), DONE], said("three", PLAIN))
    reply = run(conversation, backend, compare=True)
    assert backend.requests[0].messages == (
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two "},
    )
    assert reply.pieces == [("one ", False), ("two ", True), ("three", True)]
    assert "2.0× plain, same text" in stats_line(reply)
    assert not reply.is_cut_short
    assert conversation.turns == [Turn("count", reply)]


def test_a_reply_shows_waiting_then_the_prompts_progress_then_text() -> None:
    conversation, seen = asked("hi"), []
    events: list[Event] = [Waiting(1), Waiting(2), Waiting(1, loading=True), Prefill(512, 900)]
    for _ in conversation.answer(FakeBackend([*events, *said("yes")]), Settings(), "tab"):
        reply = conversation.turns[-1].reply
        assert reply is not None
        seen.append(reply.notice or reply.text)
    assert list(dict.fromkeys(seen)) == [
        "",
        "Waiting: 1 reply is ahead of yours",
        "Waiting: 2 replies are ahead of yours",
        "Waiting: a model is loading",
        "Reading the prompt: 512 of 900 tokens",
        "yes",
    ]


def test_display_updates_are_rate_limited() -> None:
    now = iter(range(0, 100_000, 1))
    text: list[str] = []

    def apply(event: Event) -> None:
        assert isinstance(event, Tokens)
        text.extend(piece for piece, _ in event.pieces)

    events = (Tokens(((letter, False),)) for letter in "abcdefghijklmn")
    seen = ["".join(text) for _ in follow(events, apply, lambda: next(now) / 100)]
    assert seen == ["a", "abcdefghijkl", "abcdefghijklmn"]


def test_comparing_repeats_the_request_with_plain_decoding_each_time() -> None:
    conversation = asked("hi")
    backend = FakeBackend(said("yes"), said("yes", PLAIN))
    reply = run(conversation, backend, sampling={"seed": 7}, compare=True)
    assert [request.method for request in backend.requests] == ["auto", "ar"]
    assert backend.requests[1].sampling == {"seed": 7}
    assert backend.requests[1].max_tokens == 84
    assert reply.plain == PlainRun(40.0, "yes", 80, 2.0)
    assert stats_line(reply).startswith("80 tok/s · 2.0× plain, same text · ")
    conversation.retry(0)
    slower = dataclasses.replace(PLAIN, decode_seconds=3.0)
    backend = FakeBackend(said("yes"), said("yes", slower))
    reply = run(conversation, backend, sampling={"seed": 7}, compare=True)
    assert "3.0× plain" in stats_line(reply)


def test_a_retry_is_compared_with_an_earlier_plain_reply() -> None:
    conversation = asked("hi")
    run(conversation, FakeBackend(said("yes", PLAIN)), method="ar")
    conversation.retry(0)
    reply = run(conversation, FakeBackend(said("yes!")))
    assert "2.0× plain, different text" in stats_line(reply)


def test_the_speed_of_a_few_tokens_is_not_compared() -> None:
    conversation = asked("hi")
    few = dataclasses.replace(DONE, n_tokens=8, n_first=1)
    run(conversation, FakeBackend([dataclasses.replace(few, method="ar")]), method="ar")
    assert not conversation.plain_runs
    conversation.retry(0)
    backend = FakeBackend([few])
    assert "plain" not in stats_line(run(conversation, backend, compare=True))
    assert len(backend.requests) == 1


def test_a_ratio_is_shown_only_if_both_runs_were_timed_long_enough() -> None:
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


def test_a_stopped_or_failed_plain_run_is_not_compared() -> None:
    for end in (dataclasses.replace(PLAIN, finish_reason="cancelled"), Failed("no")):
        conversation = asked("hi")
        reply = run(conversation, FakeBackend([DONE], [end]), compare=True)
        assert "plain" not in stats_line(reply)
        assert not conversation.plain_runs


def test_the_stats_line_shows_a_replys_figures() -> None:
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
        "## You\n\none\n\n## Model\n\nre: one\n\n<sub>m.gguf · auto · 80 tok/s · "
        "2.1 tokens per step · 41 % accepted · first token 0.25 s · "
        "context 312 / 2048</sub>\n"
    )


def test_an_exported_reply_closes_its_code_and_collapses_its_reasoning() -> None:
    conversation = talk("one")
    folded = "<details><summary>Reasoning</summary>\n\n{}\n\n</details>\n\n{}"
    for text, opening, exported in (
        ("```py\nx = 1", "", "```py\nx = 1\n```"),
        ("~~~~\n```\n~~~~", "", "~~~~\n```\n~~~~"),
        ("```\na\n```\n```b", "", "```\na\n```\n```b\n```"),
        ("<think>hm</think>\n\nyes", "", folded.format("hm", "yes")),
        ("```\na</think>\n```\nb", "<think>", folded.format("```\na\n```", "```\nb\n```")),
    ):
        conversation.turns[0].reply = Reply("ar", [(text, False)], opening=opening)
        assert f"## Model\n\n{exported}\n\n<sub>ar" in markdown(conversation)


def test_reasoning_is_left_out_of_later_prompts() -> None:
    conversation = talk("one", "two")
    for turn, opening in zip(conversation.turns, ("", "<think>\n"), strict=True):
        text = "hm</think>yes" if opening else "<think>hm</think>yes"
        turn.reply = Reply("ar", [(text, False)], opening=opening)
    conversation.ask("three")
    said = [message["content"] for message in conversation.messages()]
    assert said == ["one", "yes", "two", "yes", "three"]


@pytest.mark.parametrize("opened_again", [[], [Opening("<think>\n")]])
def test_a_continued_reply_keeps_its_reasoning_and_its_setting(opened_again: list[Event]) -> None:
    conversation = asked("one")
    begun = FakeBackend([Opening("<think>"), *said("hm", CUT)])
    assert run(conversation, begun, thinking=True).reasoning == (0, 2, 2)
    conversation.continue_reply()
    backend = FakeBackend([*opened_again, *said("</think>yes")])
    rest = run(conversation, backend, thinking=False)
    assert backend.requests[0].thinking is True
    assert (rest.opening, rest.answer) == ("<think>", "yes")
