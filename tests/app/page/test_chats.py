"""Chats over HTTP: their branches, incognito ones, and what can be done with them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from app.page.chats import FIRST_INCOGNITO
from tests.support.fake_backend import DONE
from tests.support.page import Page, Written, said, talk


def test_retry_edit_choose_and_delete_make_branches_and_destroy_nothing(
    page: Page, backend: Written
) -> None:
    chat, (one, first, _, _) = talk(page, backend, "one", "two")
    seq = page.get("state")["seq"]
    (second,) = page.post(f"turns/{first}/retry")["turns"]
    assert second["siblings"] == [first, second["id"]]
    assert said(backend) == ["one"]
    backend.write("again", DONE)
    page.until_done(second["id"], seq)
    uno, answer = page.post(f"turns/{one}/edit", text="uno")["turns"]
    assert (uno["parent"], uno["siblings"]) == (None, [one, uno["id"]])
    backend.write("si", DONE)
    page.until_done(answer["id"], seq)
    (better,) = page.post(f"turns/{answer['id']}/edit", text="**sí**")["turns"]
    assert (better["blocks"], better["state"]) == (["<p><strong>sí</strong></p>\n"], "done")

    chosen = page.post(f"turns/{one}/choose")
    assert [turn["id"] for turn in chosen["turns"]] == [one, second["id"]]
    page.post(f"chats/{chat}/messages", text="three")
    assert said(backend) == ["one", "again", "three"]
    page.ask("DELETE", f"turns/{second['id']}", 409)
    backend.write(DONE)
    page.until(chat, lambda turn: turn["state"] == "done")
    gone = page.ask("DELETE", f"turns/{second['id']}")
    assert [turn["text"] for turn in gone["turns"]] == ["re: one", "two", "re: two"]
    back = page.post(f"turns/{second['id']}/restore")
    assert [turn["text"] for turn in back["turns"]] == ["again", "three", ""]
    told = [data for kind, data in page.events(seq, until="restored") if kind == "turns"]
    assert [(data["after"], len(data["turns"])) for data in told] == [
        (one, 1),
        (None, 2),
        (uno["id"], 1),
        (None, 2),
        (second["id"], 2),
        (one, 3),
        (one, 3),
    ]


def test_chats_are_named_pinned_copied_deleted_exported_and_imported(
    page: Page, backend: Written
) -> None:
    chat, turns = talk(page, backend, "What's <up>?")
    assert page.get("search?q=up")["hits"][0]["snippet"] == ["What's <", "up", ">?"]
    assert page.get("search?q=up")["n"] == 2
    changed = page.ask("PATCH", f"chats/{chat}", is_pinned=True)
    assert (changed["title"], changed["is_pinned"]) == ("What's <up>?", True)
    copy = page.post(f"chats/{chat}/duplicate", turn=turns[0])
    assert [turn["text"] for turn in page.turns(copy["id"])] == ["What's <up>?"]
    assert [one["id"] for one in page.get("chats?before=" + chat)["chats"]] == [copy["id"]]
    exported = page.client.get(f"chats/{chat}/export")
    named = "filename=\"What s up.json\"; filename*=UTF-8''What%20s%20up.json"
    assert exported.headers["content-disposition"] == f"attachment; {named}"
    assert "re: What's <up>?" in page.client.get(f"chats/{chat}/export?format=md").text
    page.ask("DELETE", f"chats/{copy['id']}")
    page.get(f"chats/{copy['id']}", 404)
    assert page.post(f"chats/{copy['id']}/restore")["id"] == copy["id"]
    back = page.client.post("import", content=exported.content).json()
    assert back["refused"] == []
    preset = page.post("presets", name="mine", settings={"method": "guess"})
    assert page.get("state")["presets"] == [preset]
    page.ask("DELETE", "presets", id=preset["id"])
    assert page.get("state")["presets"] == []


def test_incognito_chats_are_in_no_list_no_file_and_no_memory(
    page: Page, backend: Written, tmp_path: Path
) -> None:
    seq = page.get("state")["seq"]
    chat = page.new_chat(incognito=True)
    asked, _ = page.post(f"chats/{chat}/messages", text="secret")["turns"]
    assert asked["id"] == FIRST_INCOGNITO
    first = backend.requests[0]
    assert (first.memory, first.on_disk) == (None, False)
    backend.write("hush", DONE)
    page.until(chat, lambda turn: turn["state"] == "done")
    page.post(f"turns/{asked['id']}/edit", text="secret!")
    backend.write("hush!", DONE)
    assert page.until(chat, lambda turn: turn["state"] == "done")["text"] == "hush!"
    assert page.get("chats")["chats"] == []
    assert page.get("search?q=secret")["hits"] == []
    kinds = {kind for kind, _ in page.events(seq, until="incognito")}
    assert kinds == {"turns", "turn"}
    with sqlite3.connect(tmp_path / "chats.db") as database:
        assert database.execute("SELECT count(*) FROM turns").fetchone() == (0,)
