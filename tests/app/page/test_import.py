"""Imports: what a file says of a chat is read anew, in a process of its own."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

from app.page.chats import Chats
from app.page.imported import chats_of
from app.page.reply import Reply
from app.page.steps import MOST_BYTES
from app.store import Found
from tests.support.page import Page

SCRIPT = '"><img src=x onerror=alert(1)>'
TREE = [[0.1, 2.0, 0.1, 2, 1, [[-1, "a", 0]], [0], "b"]]


def packed(steps: object, **more: object) -> bytes:
    kept = {"method": "auto", "sources": ["suffix"], "steps": steps, **more}
    return zlib.compress(json.dumps(kept).encode())


def export(reply: dict[str, Any] | None = None, steps: bytes = b"", **more: Any) -> bytes:
    """The export of a chat with a message and a reply."""
    times = {"created_at": 1.0, "changed_at": 2.0}
    about = {"id": "elsewhere-12", "title": "hi", "is_named": False, "is_pinned": False}
    said = {"parent": None, "role": "user", "text": "hello", "state": "done", **more}
    told = {**said, "parent": 0, "role": "assistant", "text": "re: hi", "reply": reply or {}}
    told["steps"] = base64.b64encode(steps).decode()
    chat = {**about, **times, "settings": {}, "leaf": 1, "turns": [said, told]}
    file = {"format": "speculation-chats", "version": 2, "chats": [{**chat, **more}]}
    return json.dumps(file).encode()


@pytest.mark.parametrize(
    "steps",
    [
        packed([[SCRIPT, *TREE[0][1:]]]),
        packed([[0.1, 2.0, 0.1, 2, 1, [[-1, "a", SCRIPT]], [0], "b"]]),
        packed([[float("nan"), *TREE[0][1:]]]),
        packed({}),
        packed(TREE, sources=5),
        b"no",
        zlib.compress(b"[" + b" " * MOST_BYTES + b"]"),
        packed(TREE)[:-8],
    ],
)
def test_steps_that_no_reply_has_are_refused(steps: bytes) -> None:
    assert list(chats_of(export(steps=steps))) == ["Chat 1 (hi): it is damaged."]


@pytest.mark.parametrize(
    "reply",
    [
        {"done": {"finish_reason": "stop", "n_prompt": "5x", "n_tokens": [], "n_first": None}},
        {"cells": [[SCRIPT, 1]]},
        {"cells": [["1e999", 1]]},
        {"runs": [[10**15, 1], [-(10**15) + 6, 1]]},
        {"figures": [[SCRIPT]]},
        {"n_ctx": float("inf"), "reads_from": 1},
        {"reads_from": "x", "n_ctx": "x"},
        {"opening": ["<think>"]},
        {"seconds_thinking": {}},
    ],
)
def test_of_a_reply_with_odd_fields_the_text_is_kept(reply: dict[str, Any]) -> None:
    (found,) = chats_of(export(reply))
    assert isinstance(found, Found)
    assert found.turns[1].reply == Reply(text="re: hi").as_json()


def test_an_imported_chat_is_shown_as_its_file_has_it_and_can_be_opened(page: Page) -> None:
    reply = {"model": "m", "cells": [["1.5", 2]], "done": {"finish_reason": "stop", "odd": SCRIPT}}
    odd = {"settings": {"method": 5, "sampling": [SCRIPT]}, "deleted_at": 5.0}
    file = export(reply, packed(TREE, more=SCRIPT), **odd)
    seq = page.get("state")["seq"]
    (chat,) = page.client.post("import", content=file).json()["chats"]
    told = page.events(seq, until="imported")
    assert [data for kind, data in told if kind == "import"] == [{"done": 0, "total": 1}]
    assert (chat["settings"], chat["title"]) == ({}, "hi")
    _, turn = page.turns(chat["id"])
    assert (turn["text"], turn["model"], turn["cells"]) == ("re: hi", "m", [[1.5, 2]])
    asked, _ = page.turns(chat["id"])
    page.ask("DELETE", f"turns/{turn['id']}")  # a message without a reply can be answered
    assert page.post(f"turns/{asked['id']}/retry")["turns"][0]["parent"] == asked["id"]
    page.post(f"turns/{turn['id']}/restore")
    kept = {"method": "auto", "sources": ["suffix"], "steps": TREE}
    assert page.get(f"turns/{turn['id']}/steps") == kept


def test_steps_and_replies_that_an_earlier_import_kept_are_not_trusted(
    page: Page, chats: Chats
) -> None:
    chat, (_, reply) = page.talk("hi")
    chats.kept.save_steps(reply, packed([[SCRIPT]]))
    page.get(f"turns/{reply}/steps", 404)
    chats.kept.save_reply(reply, "re", {"n_ctx": "x", "reads_from": 5, "done": {"x": 5}}, "done")
    assert page.turns(chat)[1]["text"] == "re"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 6_000_000, "it has more than 5,000,000 commas and brackets. Import it in parts."),
        (b"\xff\xfe", "it is no export of chats, which would be JSON, or a part of it is missing."),
        (b"[]", "it has no chats."),
        (b"5", "it has no chats of this program, ChatGPT or Open WebUI."),
    ],
)
def test_a_file_without_chats_is_refused_in_plain_words(page: Page, body: bytes, why: str) -> None:
    answer = page.client.post("import", content=body)
    told = answer.json()["error"]["message"]
    assert (answer.status_code, told) == (400, f"Cannot import this file: {why}")
