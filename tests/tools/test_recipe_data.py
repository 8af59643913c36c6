"""Training data of the bundled model: exercises and token weights, without PyTorch."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from tools.recipe import tasks, wishes
from tools.recipe.corpus import Corpus, Fact, Message, Word
from tools.recipe.rows import said_weights
from tools.recipe.tokenizer import BOS, END, ROLES

CORPUS = Corpus(
    books=["The train was late.\nOld Tobias sang a song.\n" * 40],
    sentences=[f"The train to {place} was late, and nobody minded." for place in "ABCDEFGHIJ"],
    dialogues=[[Message("user", "A table, please."), Message("assistant", "For how many?")]],
    smalltalk=[[Message("user", "Hello!"), Message("assistant", "Hi! How are you?")]],
    words=[Word(w, "noun", "a thing", "a thing of its own", ["item"]) for w in ("lamp", "stone")],
    facts={"Peru": [Fact("Peru", "Capital name", "Lima"), Fact("Peru", "Climate", "mild")]},
    backgrounds=[Fact("Peru", "Background", "It is old. It is large; it is high.")],
    problems=[("How many are 2 and 3?", "2 + 3 = 5\nThe answer is 5.")],
    splits=[("It rained and we slept.", "It rained. We slept.")],
    meetings=[[Message("Ana", "We could begin now."), Message("Bo", "Let us wait for Carl.")]],
    abstracts=[("We show that it works.", "It works.")],
)


def chats(name: str, count: int = 100) -> list[list[Message]]:
    make = tasks.TASKS[name][1]
    return [make(tasks.Draw(CORPUS, random.Random(f"{name}{i}"))) for i in range(count)]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_an_exercise_is_a_chat_of_questions_and_replies(name: str) -> None:
    for chat in chats(name):
        roles = [message.role for message in chat if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles and all(message.text for message in chat)


def test_the_same_seed_gives_the_same_exercises() -> None:
    assert [chats(name, 5) for name in tasks.TASKS] == [chats(name, 5) for name in tasks.TASKS]


def test_a_wish_is_one_or_more_questions_without_answers() -> None:
    found = [wishes.wish(tasks.Draw(CORPUS, random.Random(i))) for i in range(300)]
    for chat in found:
        assert [message.role for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        assert all(bool(message.text) == (message.role == "user") for message in chat)
    assert {len(chat) for chat in found} == {2, 4, 6}
    assert len({chat[0].text for chat in found}) > 250


@pytest.mark.parametrize(
    "name", ["repeat", "quote_sentence", "quote_with_word", "lines_from_list", "capitals_in_text"]
)
def test_a_quotation_occurs_in_the_question(name: str) -> None:
    for question, reply in chats(name):
        assert reply.text in question.text


def test_a_replaced_word_is_the_only_change() -> None:
    changed = 0
    for question, reply in chats("replace_word"):
        if "eplace" in question.text or "hange" in question.text or "ewrite" in question.text:
            changed += reply.text not in question.text
    assert changed > 80


def test_two_facts_told_in_one_sentence_are_asked_for_separately() -> None:
    told = [chat for chat in chats("told_facts", 400) if " and I live in" in chat[0].text]
    asked = {message.text: reply.text for chat in told for message, reply in pairwise(chat)}
    assert len(told) > 10
    assert " and " not in asked["Where do I live?"] + asked["What is my name?"]


def test_user_messages_can_weigh_less_than_replies() -> None:
    ids = np.array([
        BOS, ROLES["system"], 300, END, ROLES["user"], 301, 302, END, ROLES["assistant"], 303, END,
        ROLES["user"], 304, END, ROLES["assistant"], 305, 306, END, BOS, ROLES["user"], 307,
    ])  # fmt: skip
    assert said_weights(ids, 0.25).tolist() == [
        0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 1, 1,
        0.25, 0.25, 0.25, 0.25, 1, 1, 1, 0.25, 0.25, 0.25,
    ]  # fmt: skip
    assert said_weights(ids, 1.0).tolist() == [1.0] * 20
