"""Chats over HTTP: their branches, files and titles, incognito ones, and who sees which."""

from __future__ import annotations

import base64
import sqlite3
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from app.page import titles
from app.page.chats import FIRST_INCOGNITO
from app.page.prompt import with_files
from app.page.reply import Reply
from app.page.titles import title_in
from app.page.turns import turn_json
from app.store import Turn
from app.worker.messages import ModelFacts, Report, Status
from tests.support.fake_backend import DONE, MODEL, FakeBackend
from tests.support.page import Page, Written, said, served
from tests.support.waiting import wait_until


def test_retry_edit_choose_and_delete_make_branches_and_destroy_nothing(page: Page) -> None:
    chat, (one, first, _, _) = page.talk("one", "two")
    seq = page.get("state")["seq"]
    (second,) = page.post(f"turns/{first}/retry")["turns"]
    assert second["siblings"] == [first, second["id"]]
    assert said(page.backend) == ["one"]
    page.backend.write("again", DONE)
    page.until_done(second["id"], seq)
    uno, answer = page.post(f"turns/{one}/edit", text="uno")["turns"]
    assert (uno["parent"], uno["siblings"]) == (None, [one, uno["id"]])
    page.backend.write("si", DONE)
    page.until_done(answer["id"], seq)
    (better,) = page.post(f"turns/{answer['id']}/edit", text="**sí**")["turns"]
    assert (better["blocks"], better["state"]) == (["<p><strong>sí</strong></p>\n"], "done")

    chosen = page.post(f"turns/{one}/choose")
    assert [turn["id"] for turn in chosen["turns"]] == [one, second["id"]]
    assert not chosen["is_growing"]
    page.send(chat, "three")
    assert page.post(f"turns/{second['id']}/choose")["is_growing"]
    assert said(page.backend) == ["one", "again", "three"]
    page.ask("DELETE", f"turns/{second['id']}", 409)
    page.reply(chat)
    gone = page.ask("DELETE", f"turns/{second['id']}")
    assert [turn["text"] for turn in gone["turns"]] == ["re: one", "two", "re: two"]
    back = page.post(f"turns/{second['id']}/restore")
    assert [turn["text"] for turn in back["turns"]] == ["again", "three", ""]
    told = [data for kind, data in page.events(seq, until="restored") if kind == "turns"]
    found = [(data["after"], len(data["turns"])) for data in told]
    end = [(None, 2), (second["id"], 2), (one, 3), (one, 3), (one, 3)]
    assert found == [(one, 1), (None, 2), (uno["id"], 1), *end]


def test_chats_are_named_pinned_copied_deleted_exported_and_imported(page: Page) -> None:
    chat, turns = page.talk("What's <up>?")
    assert page.get("search?q=up")["hits"][0]["snippet"] == ["What's <", "up", ">?"]
    assert page.get("search?q=up")["n"] == 2
    changed = page.ask("PATCH", f"chats/{chat}", is_pinned=True)
    assert (changed["title"], changed["is_pinned"]) == ("What's <up>?", True)
    copy = page.post(f"chats/{chat}/duplicate", turn=turns[0])["id"]
    assert [turn["text"] for turn in page.turns(copy)] == ["What's <up>?"]
    assert [one["id"] for one in page.get("chats?before=" + chat)["chats"]] == [copy]
    exported = page.client.get(f"chats/{chat}/export")
    named = "filename=\"What s up.json\"; filename*=UTF-8''What%20s%20up.json"
    assert exported.headers["content-disposition"] == f"attachment; {named}"
    assert "re: What's <up>?" in page.client.get(f"chats/{chat}/export?format=md").text
    page.ask("DELETE", f"chats/{copy}")
    page.get(f"chats/{copy}", 404)
    assert page.post(f"chats/{copy}/restore")["id"] == copy
    assert page.client.post("import", content=exported.content).json()["refused"] == []
    preset = page.post("presets", name="mine", settings={"method": "guess"})
    assert page.get("state")["presets"] == [preset]
    page.ask("DELETE", "presets", id=preset["id"])
    assert page.get("state")["presets"] == []


def test_incognito_chats_are_in_no_list_no_file_and_no_memory(page: Page, tmp_path: Path) -> None:
    seq = page.get("state")["seq"]
    chat = page.new_chat(incognito=True)
    asked, _ = page.send(chat, "secret")
    assert asked["id"] == FIRST_INCOGNITO
    first = page.backend.requests[0]
    assert (first.memory, first.on_disk) == (None, False)
    page.reply(chat, "hush")
    page.post(f"turns/{asked['id']}/edit", text="secret!")
    assert page.reply(chat, "hush!")["text"] == "hush!"
    assert page.get("chats")["chats"] == page.get("search?q=secret")["hits"] == []
    assert {kind for kind, _ in page.events(seq, until="incognito")} == {"turns", "turn"}
    with sqlite3.connect(tmp_path / "chats.db") as database:
        assert database.execute("SELECT count(*) FROM turns").fetchone() == (0,)


# Files

FOX = {"name": "fox.txt", "text": "The fox.\nThe hen.", "leads": True}
HEN = {"name": "hen.md", "text": "```\nhen()\n```", "leads": False}
FOX_READ = "fox.txt:\n```\nThe fox.\nThe hen.\n```"
HEN_READ = "hen.md:\n````\n```\nhen()\n```\n````"


def test_the_model_reads_files_as_code_blocks_before_or_after_the_text() -> None:
    assert with_files("  Well?", ()) == "  Well?"
    assert with_files("Well?", (FOX,)) == f"{FOX_READ}\n\nWell?"
    assert with_files("Well?", (HEN,)) == f"Well?\n\n{HEN_READ}"
    assert with_files("Well?", (HEN, FOX)) == f"{FOX_READ}\n\nWell?\n\n{HEN_READ}"
    assert with_files("", (FOX, HEN)) == f"{FOX_READ}\n\n{HEN_READ}"


def test_sizes_count_utf_8_bytes() -> None:
    texts = [*("x" * n for n in (999, 1000, 999_499, 999_500)), "é" * 3]
    files = tuple({"name": "a", "text": text} for text in texts)
    told = turn_json(Turn(1, "", None, "user", "", files), (1,))["files"]
    shown = ["999 B", "1 kB", "999 kB", "1.0 MB", "6 B"]
    assert [file["size"] for file in told] == shown


def pdf_of(text: str) -> bytes:
    """A PDF of one page."""
    stream = f"BT /F1 12 Tf 10 10 Td ({text}) Tj ET"
    objects = (
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 50]/Contents 4 0 R"
        "/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(stream)}>>stream\n{stream}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    made, at = "%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        at.append(len(made))
        made += f"{number} 0 obj\n{one}\nendobj\n"
    table = "".join(f"{start:010} 00000 n \n" for start in at)
    end = f"xref\n0 6\n0000000000 65535 f \n{table}trailer<</Size 6/Root 1 0 R>>\nstartxref\n"
    return f"{made}{end}{len(made)}\n%%EOF".encode()


def test_files_and_pdfs_go_with_a_message_and_unreadable_ones_are_refused(page: Page) -> None:
    chat, other = page.new_chat(), page.new_chat()
    pdf = base64.b64encode(pdf_of("The hen.")).decode()
    files = [{"name": "fox.txt", "text": "The fox."}, {"name": "hen.pdf", "pdf": pdf}]
    asked, _ = page.send(chat, "Well?", files=files)
    fox = "fox.txt:\n```\nThe fox.\n```\n\n"
    assert said(page.backend) == [f"{fox}hen.pdf:\n```\nThe hen.\n```\n\nWell?"]
    assert asked["files"] == [{"name": name, "size": "8 B"} for name in ("fox.txt", "hen.pdf")]
    assert page.get(f"turns/{asked['id']}/files/1")["text"] == "The hen."
    page.reply(chat, "yes")
    page.post(f"turns/{asked['id']}/edit", text="So?", files=[{"kept": 0}])
    assert said(page.backend) == [f"{fox}So?"]
    broken = [{"name": "x.pdf", "pdf": base64.b64encode(b"%PDF-1.4 no").decode()}]
    error = page.post(f"chats/{other}/messages", 400, text="", files=broken)["error"]
    assert error["message"].startswith("x.pdf cannot be read as a PDF: ")
    page.post(f"chats/{other}/messages", 400, text=" ")
    page.post(f"turns/{asked['id']}/edit", 400, text=" ", files=[])
    page.post(f"turns/{2**64}/retry", 400)
    page.get(f"chats/{chat}?before={2**64}", 400)
    assert page.turns(other) == []


# Titles that the model writes


@pytest.fixture
def able(page: Page, monkeypatch: pytest.MonkeyPatch) -> Page:
    """A page whose model writes titles, and soon."""
    monkeypatch.setattr(titles, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(titles, "LOOK_SECONDS", 0.01)
    page.backend.state = Status(MODEL, facts=ModelFacts(n_params=10**9))
    return page


def title(page: Page, chat: str) -> str:
    return str(page.get(f"chats/{chat}")["chat"]["title"])


def titled(page: Page, n: int) -> str:
    """What a title is asked for with the request of this number, which is the last one."""
    wait_until(lambda: len(page.backend.requests) >= n)
    (asked,) = page.backend.requests[n - 1 :]
    assert (asked.method, asked.max_tokens, asked.memory, asked.on_disk) == ("ar", 24, None, False)
    return str(asked.messages[0]["content"]).partition("User: ")[2]


def test_the_model_writes_a_title_after_the_first_reply_while_nothing_else_runs(
    able: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, running, n_looks = able.backend, ["other"], 0

    def report() -> Report:
        nonlocal n_looks
        n_looks += 1
        return Report(tuple(running))

    def until_looked() -> None:
        n = n_looks
        wait_until(lambda: n_looks > n + 10)

    monkeypatch.setattr(backend, "report", report)
    chat, _ = able.talk("Which rivers?")
    until_looked()
    assert len(backend.requests) == 1  # something else runs
    running.clear()
    wait_until(lambda: len(backend.requests) == 2)
    running += ["title", "another"]
    backend.write("Ri")
    until_looked()
    running.clear()
    # It was ended, and begins anew.
    assert titled(able, 3) == "Which rivers?\n\nModel: re: Which rivers?"
    backend.write('"Rivers ', 'of Europe".', DONE)
    wait_until(lambda: title(able, chat) == "Rivers of Europe")
    able.send(chat, "more")
    able.reply(chat, "re")
    able.talk("next")
    assert titled(able, 6).startswith("next")  # the second reply asks for none


def test_a_title_of_the_user_stays_and_a_small_or_missing_model_writes_none(able: Page) -> None:
    backend, large = able.backend, able.backend.state
    backend.state = Status(MODEL)
    able.talk("small")
    backend.state = large
    named = able.new_chat()
    able.ask("PATCH", f"chats/{named}", title="Mine")
    able.send(named, "named")
    able.reply(named, "re")
    chat, _ = able.talk("hi")
    assert titled(able, 4).startswith("hi")
    able.ask("PATCH", f"chats/{chat}", title="Mine")
    backend.write("Greeting", DONE)
    cut, _ = able.talk("hello")
    assert titled(able, 6).startswith("hello")
    assert title(able, chat) == "Mine"
    backend.write("A greeting that", replace(DONE, finish_reason="length"))
    able.talk("next")
    assert titled(able, 8).startswith("next")
    assert title(able, cut) == "hello"


def test_only_a_short_line_is_a_title() -> None:
    assert title_in(Reply(text="<think>\nhm\n</think>\n\n# Title: Rivers\n", done=DONE)) == "Rivers"
    for text in ("", "  \n", "x", "word " * 20, "one\ntwo", "<think>\nhm", "“”", "```html"):
        assert title_in(Reply(text=text, done=DONE)) == ""
    assert title_in(Reply(text="Rivers", done=replace(DONE, finish_reason="length"))) == ""


# Who may use the page's routes, and whose chats they see


def test_every_key_and_every_browser_of_others_has_its_own_chats(tmp_path: Path) -> None:
    with served(Written(), tmp_path / "a.db", keys=("a", "b"), is_one=False) as site:
        ann, bob = (site.page(Authorization=f"Bearer {key}") for key in "ab")
        assert site.page().get("state", 401)
        chat = ann.new_chat()
        assert bob.get("chats")["chats"] == []
        bob.get(f"chats/{chat}", 404)
        ann.send(chat, "hi")
        assert ann.backend.requests[0].memory == ann.get("state")["owner"] != ""
    with served(FakeBackend(), tmp_path / "b.db", host="0.0.0.0", is_one=False) as site:
        ann, bob = site.page(), site.page()
        assert "Ask for /page/state first" in ann.get("chats", 403)["error"]["message"]
        cookie = ann.client.get("state").headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        bob.get("state")
        assert "set-cookie" not in ann.client.get("state").headers
        chat = ann.new_chat()
        assert [one["id"] for one in ann.get("chats")["chats"]] == [chat]
        assert bob.get("chats")["chats"] == []
        bob.get(f"chats/{chat}", 404)
    with served(FakeBackend(), tmp_path / "c.db") as site:
        answer = site.page().client.get("state")
        assert (answer.json()["owner"], "set-cookie" in answer.headers) == ("", False)


def test_other_sites_and_unknown_methods_are_refused_in_the_endpoints_form(page: Page) -> None:
    own = str(page.client.base_url).removesuffix("/page/")
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:1"},  # enough for the endpoint
        {"Host": "evil.example"},
    ):
        answer = page.client.post("chats", json={}, headers=headers)
        assert answer.status_code == 403, headers
        assert answer.json()["error"]["type"] == "permission_error"
        for path in ("state", "events"):
            with page.client.stream("GET", path, headers=headers) as answer:
                assert answer.status_code == 403
    assert page.client.post("chats", json={}, headers={"Origin": own}).status_code == 200
    assert httpx.put(f"{own}/page/chats").json()["error"]["code"] == 405
    assert httpx.get(f"{own}/page/nothing").json()["error"]["code"] == 404
    assert page.ask("PATCH", f"chats/{page.new_chat()}", title="Mine")["title"] == "Mine"
