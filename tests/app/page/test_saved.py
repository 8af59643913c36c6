"""Conversations saved as JSON, and read back."""

from __future__ import annotations

import dataclasses
import json

from app.page.conversation import Conversation, PlainRun, Settings, stats_line
from app.page.saved import UNFINISHED, from_text, to_text
from app.page.session import Session
from app.worker.messages import Failed, ModelSpec, Tokens
from tests.support.fake_backend import DONE, MODEL, FakeBackend, run, talk


def test_a_conversation_comes_back_as_it_was() -> None:
    conversation = talk("one", 'two "quoted" é\n', "three")
    turns = conversation.turns
    assert turns[0].reply is not None
    assert turns[1].reply is not None
    spec = ModelSpec("m.gguf", draft_model="paired", heads=("a", "b"))
    model = dataclasses.replace(MODEL, spec=spec)
    turns[0].reply.done = dataclasses.replace(DONE, model=model)
    turns[0].reply.pieces = [("a", True), ("", False), ("é", True)]
    turns[1].reply.plain = PlainRun(80.5, "re", 161, 2.0)
    run(conversation, FakeBackend([Failed("the context is full")]))
    assert from_text(to_text(conversation)).turns == turns
    assert to_text(Conversation()) == ""
    assert from_text("").turns == from_text(None).turns == []


def test_an_unfinished_reply_says_so() -> None:
    conversation = talk("one")
    conversation.ask("two")
    reply = from_text(to_text(conversation)).turns[1].reply
    assert reply is not None
    assert (reply.method, reply.text, reply.error) == ("", "", UNFINISHED)
    run(conversation, FakeBackend([Tokens((("ha", True),))]))
    reply = from_text(to_text(conversation)).turns[1].reply
    assert reply is not None
    assert (reply.text, reply.error) == ("ha", UNFINISHED)


def test_a_comparison_of_an_older_version_is_read_without_its_ratio() -> None:
    conversation = talk("one")
    assert conversation.turns[0].reply is not None
    conversation.turns[0].reply.plain = PlainRun(12.5, "re", 80, 6.4)
    text = to_text(conversation)
    assert "× plain" in stats_line(conversation.turns[0].reply)
    reply = from_text(text.replace(', "n_tokens": 80, "seconds": 6.4', "")).turns[0].reply
    assert reply is not None
    assert reply.plain == PlainRun(12.5, "re", 0, 0.0)
    assert "plain" not in stats_line(reply)


def test_the_tail_of_a_reply_has_the_tokens_since_the_last_full_save() -> None:
    tab = Session(talk("one"))
    tab.conversation.ask("two")
    assert (tab.saved(), tab.tail()) == (to_text(tab.conversation), "")
    events = [Tokens((("a", True),)), Tokens((("b", False),)), Tokens((("c", True),))]
    tails = []
    times = iter([0, 1, 1, 2, 2, *range(3, 99)])  # an update for each text
    backend = FakeBackend([*events, DONE])
    answer = tab.conversation.answer(backend, Settings(), "tab", clock=lambda: next(times))
    for n, _ in enumerate(answer):
        if n == 2:
            tab.saved()
        tails.append(json.loads(tab.tail()))
    assert {tail["turn"] for tail in tails} == {1}
    assert [(tail["start"], tail["reply"]["pieces"]) for tail in tails[:4]] == [
        (0, []),
        (0, [["a", True]]),
        (2, []),
        (2, [["c", True]]),
    ]
    assert tails[0]["reply"].keys() == json.loads(to_text(tab.conversation))[1]["reply"].keys()


def test_unreadable_data_is_an_empty_conversation() -> None:
    one = '[{"user": "a", "reply": {"method": "ar"}}]'
    damaged = to_text(talk("one")).replace('"n_tokens": 84', '"n_tokens": "84"')
    for text in ("{", "3", '{"turns": []}', '[{"user": "a"}]', one, "[4]", damaged):
        assert from_text(text).turns == [], text
