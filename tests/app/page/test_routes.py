"""Chats over HTTP: replies as jobs, branches, files, owners, incognito, and what comes back."""

from __future__ import annotations

import base64
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.page import jobs, routes
from app.page.chats import FIRST_INCOGNITO, Chats
from app.page.prompt import prompt_of
from app.store import Store, StoreError, Turn
from app.worker.messages import (
    Failed,
    LeftOut,
    Loaded,
    Loading,
    ModelSpec,
    Opening,
    Prefill,
    Status,
    Tokens,
    Waiting,
)
from tests.support.fake_backend import DONE, MODEL, FakeBackend
from tests.support.local_backend import LocalBackend
from tests.support.page import Page, Written, served

CUT = replace(DONE, finish_reason="length")


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Page, Written, Chats]]:
    backend = Written()
    with served(backend, tmp_path / "chats.db") as site:
        yield site.page(), backend, site.chats


def talk(page: Page, backend: Written, *texts: str) -> tuple[str, list[int]]:
    """A chat with messages and the replies to them; returns it and its turns."""
    chat = page.new_chat()
    for text in texts:
        page.post(f"chats/{chat}/messages", text=text)
        backend.write(f"re: {text}", DONE)
        page.until(chat, lambda turn: turn["state"] == "done")
    return chat, [turn["id"] for turn in page.turns(chat)]


def said(backend: Written) -> list[str]:
    """What the last request says, without roles."""
    return [message["content"] for message in backend.requests[-1].messages]


def test_a_reply_goes_on_without_a_page_and_can_be_stopped_and_continued(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
    chat = page.new_chat(settings={"method": "guess", "system": " Be brief. ", "half": "\ud83d"})
    _, reply = page.post(f"chats/{chat}/messages", text="count\n")["turns"]
    assert (reply["state"], reply["method"], reply["model"]) == ("running", "guess", "m.gguf")
    backend.write(Waiting(1), Prefill(512, 900))
    page.until(chat, lambda turn: turn["notice"] == "Reading the prompt: 512 of 900 tokens")
    backend.write("one ", Tokens((("two \ufffd", True),)))
    shown = page.until(chat, lambda turn: turn["blocks"])
    assert shown["blocks"] == ['<p>one <span class="drafted" data-n="1">two \ufffd</span></p>\n']
    assert page.get("chats")["chats"][0]["running"] == reply["id"]
    refused = page.post(f"chats/{chat}/messages", 409, text="more")["error"]["message"]
    assert refused == jobs.BUSY
    page.post(f"turns/{reply['id']}/stop")
    stopped = page.until(chat, lambda turn: turn["state"] == "done")
    assert stopped["can_continue"]
    page.post(f"turns/{reply['id']}/continue")
    assert backend.requests[1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two "},
    )
    backend.write("three", DONE)
    ended = page.until(chat, lambda turn: turn["state"] == "done")
    assert (ended["id"], ended["text"], ended["can_continue"]) == (
        reply["id"],
        "one two three",
        False,
    )
    assert ended["figures"][0] == ["Speed", "80 tokens/s"]
    assert ended["n_context"] == 312
    page.post(f"turns/{reply['id']}/continue", 409)


def test_retry_edit_choose_and_delete_make_branches_and_destroy_nothing(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
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


def test_messages_without_a_reply_and_reasoning_are_left_out_of_later_prompts(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
    chat, _ = talk(page, backend, "one")
    page.post(f"chats/{chat}/messages", text="failed")
    backend.write(Failed("no model"))
    failed = page.until(chat, lambda turn: turn["state"] == "done")
    assert (failed["error"], failed["can_continue"]) == ("no model", False)
    page.post(f"chats/{chat}/messages", text="two")
    assert said(backend) == ["one", "re: one", "two"]
    backend.write(Opening("<think>\n"), "hm", "\n</think>\n\n", "**yes**", DONE)
    reply = page.until(chat, lambda turn: turn["state"] == "done")
    assert (reply["reasoning"], reply["blocks"], reply["text"]) == (
        ["<p>hm</p>\n"],
        ["<p><strong>yes</strong></p>\n"],
        "**yes**",
    )
    page.post(f"chats/{chat}/messages", text="three")
    assert said(backend) == ["one", "re: one", "two", "**yes**", "three"]
    assert backend.requests[-1].record


def test_the_first_turn_that_is_still_read_is_marked_and_kept(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
    chat, turns = talk(page, backend, "one", "two", "three")
    page.post(f"chats/{chat}/messages", text="four")
    backend.write(LeftOut(2, 2048), "yes", DONE)
    reply = page.until(chat, lambda turn: turn["state"] == "done")
    assert reply["n_left_out"] == 2
    marks = {turn["id"]: turn["left_out_here"] for turn in page.turns(chat)}
    assert [id_ for id_, n_ctx in marks.items() if n_ctx == 2048] == [turns[4]]
    seq = page.get("state")["seq"]
    _, fifth = page.post(f"chats/{chat}/messages", text="five")["turns"]
    assert backend.requests[-1].left_out == LeftOut(2, 2048)
    backend.write(LeftOut(3, 2048), "yes", DONE)
    moved = [
        (data["turn"], data["set"]["left_out_here"])
        for kind, data in page.until_done(fifth["id"], seq)
        if kind == "turn" and "left_out_here" in data.get("set", {})
    ]
    assert moved == [(turns[4], 0), (reply["parent"], 2048)]


def test_the_stream_tells_what_a_page_that_is_loaded_again_shows(
    written: tuple[Page, Written, Chats], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, backend, _ = written
    monkeypatch.setattr(jobs, "SHOW_SECONDS", 0.05)
    chat, seq = page.new_chat(), page.get("state")["seq"]
    _, reply = page.post(f"chats/{chat}/messages", text="hi")["turns"]
    shown: dict[str, list[str]] = {"reasoning": [], "answer": []}
    texts = iter(
        ["<think>a", "b\n\nc</think>", "one\n", "\n- two", " **three\n", "\nfour", " **five"]
    )
    n_parts = 0
    for _, kind, data in page.stream(seq):
        if kind == "turn" and "part" in data:
            shown[data["part"]][data["from"] :] = data["blocks"]
            n_parts += 1
        if kind == "turn" and data.get("set", {}).get("state") == "done":
            break
        if kind in ("turns", "turn"):
            backend.write(next(texts, DONE))
    (last,) = [turn for turn in page.turns(chat) if turn["id"] == reply["id"]]
    assert (last["reasoning"], last["blocks"]) == (shown["reasoning"], shown["answer"])
    assert shown["answer"][-1] == "<p>four **five</p>\n"
    assert n_parts > 4
    resumed = page.stream(None, last_id=str(seq + 2))
    assert [next(resumed)[0] for _ in range(3)] == [seq + 3, seq + 4, seq + 5]


def test_files_and_pdfs_go_with_a_message_and_unreadable_ones_are_refused(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
    chat = page.new_chat()
    pdf = base64.b64encode(pdf_of("The hen.")).decode()
    files = [{"name": "fox.txt", "text": "The fox."}, {"name": "hen.pdf", "pdf": pdf}]
    asked, _ = page.post(f"chats/{chat}/messages", text="Well?", files=files)["turns"]
    read = "fox.txt:\n```\nThe fox.\n```\n\nhen.pdf:\n```\nThe hen.\n```\n\n"
    assert said(backend) == [f"{read}Well?"]
    assert asked["files"] == [
        {"name": "fox.txt", "size": "8 B"},
        {"name": "hen.pdf", "size": "8 B"},
    ]
    assert page.get(f"turns/{asked['id']}/files/1")["text"] == "The hen."
    backend.write("yes", DONE)
    page.until(chat, lambda turn: turn["state"] == "done")
    page.post(f"turns/{asked['id']}/edit", text="So?", files=[{"kept": 0}])
    assert said(backend) == ["fox.txt:\n```\nThe fox.\n```\n\nSo?"]
    other = page.new_chat()
    broken = [{"name": "x.pdf", "pdf": base64.b64encode(b"%PDF-1.4 no").decode()}]
    error = page.post(f"chats/{other}/messages", 400, text="", files=broken)["error"]
    assert error["message"].startswith("x.pdf cannot be read as a PDF: ")
    page.post(f"chats/{other}/messages", 400, text=" ")
    page.post(f"turns/{asked['id']}/edit", 400, text=" ", files=[])
    page.post(f"turns/{2**64}/retry", 400)
    page.get(f"chats/{chat}?before={2**64}", 400)
    assert page.turns(other) == []


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


def test_invalid_settings_are_named_before_anything_is_written(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
    chat = page.new_chat(settings={"method": "guess"})
    for settings, name, told in (
        ({"method": "gess"}, "method", "is 'gess'; give one of ar, auto, guess"),
        ({"method": "guess", "parameters": {"x": 1}}, "parameters.x", "guess has width, deep"),
        (
            {"method": "guess", "parameters": {"width": 1.5}},
            "parameters.width",
            "is 1.5; give a whole number",
        ),
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "temperature is -1"),
        ({"sampling": {"heat": 1}}, "sampling.heat", "is not one of the sampling settings"),
        ({"sampling": {"top_k": "a"}}, "sampling.top_k", "is 'a'; give a whole number"),
        ({"max_tokens": -1}, "max_tokens", "is -1; give 0 or more"),
        ({"thinking": "yes"}, "thinking", "is 'yes'; give true, false or null"),
        ({"leave_out": 1}, "leave_out", "is 1; give true or false"),
    ):
        given = {"method": "ar", **settings}
        error = page.post(f"chats/{chat}/messages", 400, text="hi", settings=given)["error"]
        assert (error["param"], told in error["message"]) == (name, True), error
    assert page.turns(chat) == []
    good = {
        "method": "guess",
        "parameters": {"width": 5, "deep": False},
        "sampling": {"temperature": 0.5, "seed": 7, "grammar": " "},
        "max_tokens": 0,
        "colour": "of the page",
    }
    page.post(f"chats/{chat}/messages", text="hi", settings=good)
    request = backend.requests[0]
    assert request.method == "guess:width=5,deep=off"
    assert request.sampling == {"temperature": 0.5, "seed": 7}
    assert request.max_tokens is None
    assert page.get(f"chats/{chat}")["chat"]["settings"] == good


def test_replies_that_run_when_the_server_ends_are_kept_as_interrupted(tmp_path: Path) -> None:
    backend = Written()
    with served(backend, tmp_path / "chats.db") as site:
        page, chats = site.page(), site.chats
        chat = page.new_chat()
        page.post(f"chats/{chat}/messages", text="count")
        backend.write("one ", "two")
        page.until(chat, lambda turn: turn["blocks"])
        chats.jobs.close()
        kept = chats.kept.path(chat, "")[-1][0]
        assert (kept.text, kept.state) == ("one two", "interrupted")
    backend = Written()
    with served(backend, tmp_path / "chats.db") as site:
        page = site.page()
        last = page.turns(chat)[-1]
        assert (last["state"], last["can_continue"]) == ("interrupted", True)
        page.post(f"turns/{last['id']}/continue")
        assert said(backend) == ["count", "one two"]


def test_a_reply_is_saved_twice_a_second_and_again_when_the_disk_has_room(
    written: tuple[Page, Written, Chats], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, backend, chats = written
    chat = page.new_chat()
    seq = page.get("state")["seq"]
    _, reply = page.post(f"chats/{chat}/messages", text="hi")["turns"]
    backend.write("one")
    while not chats.kept.turn(reply["id"], "").text:
        time.sleep(0.05)
    save, is_full = Store.save_reply, [True]

    def save_reply(self: Store, *arguments: Any) -> None:
        if is_full[0]:
            raise StoreError("Chats cannot be kept: the disk is full.")
        save(self, *arguments)

    monkeypatch.setattr(Store, "save_reply", save_reply)
    backend.write(" two", DONE)
    page.until(chat, lambda turn: turn["error"] == "Chats cannot be kept: the disk is full.")
    page.post(f"chats/{chat}/messages", 409, text="more")
    is_full[0] = False
    events = page.until_done(reply["id"], seq)
    assert events[-1][1]["set"]["error"] == ""
    assert chats.kept.turn(reply["id"], "").text == "one two"


def test_incognito_chats_are_in_no_list_no_file_and_no_memory(
    written: tuple[Page, Written, Chats], tmp_path: Path
) -> None:
    page, backend, _ = written
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


def test_what_another_server_writes_into_the_same_file_is_read_again(
    written: tuple[Page, Written, Chats], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, backend, _ = written
    monkeypatch.setattr(routes, "FILE_SECONDS", 0.02)
    chat, _ = talk(page, backend, "one")
    with served(FakeBackend(), tmp_path / "chats.db") as site:
        other = site.page()
        seq = other.get("state")["seq"]
        told = (kind for _, kind, _ in other.stream(seq))
        page.post(f"chats/{chat}/messages", text="two")
        assert next(told) == "reset"
        assert other.turns(chat)[2]["text"] == "two"
        page.ask("PATCH", f"chats/{chat}", title="mine")
        assert next(told) == "reset"
        assert other.get("chats")["chats"][0]["title"] == "mine"
        other.ask("PATCH", f"chats/{chat}", title="yours")
        assert "chat" in told  # its own change is told as it is


def test_a_message_in_a_chat_of_150_turns_costs_its_own_text(
    written: tuple[Page, Written, Chats], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, backend, chats = written
    monkeypatch.setattr(jobs, "SHOW_SECONDS", 0.005)  # more updates than there ever are
    chat, parent = page.new_chat(), None
    for number in range(75):
        for role in ("user", "assistant"):
            text = f"The {role}'s text number {number}. " * 20
            parent = chats.kept.add_turn(chat, "", parent, role, text).id
    seq, n_up, n_down = page.get("state")["seq"], 0, 0
    message = page.client.post(f"chats/{chat}/messages", json={"text": "How now? " * 20})
    n_up += len(message.request.content) + len(message.request.headers.raw) * 40
    n_down += len(message.content)
    with page.client.stream("GET", "events", params={"after": str(seq)}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        n_shown = 0
        for line in answer.iter_lines():
            n_shown += line.startswith("event: turn")
            if n_shown < 100:
                backend.write(Tokens(((f"word {n_shown}, ", False), ("and more ", True))))
            elif n_shown == 100:
                backend.write(DONE)
            if line.startswith("data: ") and json.loads(line[6:]).get("set", {}).get("sentence"):
                break
        n_down += answer.num_bytes_downloaded
    assert n_shown > 90
    assert n_up < 10_000
    assert n_down < 60_000


def test_every_key_and_every_browser_of_others_has_its_own_chats(tmp_path: Path) -> None:
    backend = Written()
    with served(backend, tmp_path / "a.db", keys=("a", "b"), is_one=False) as site:
        ann, bob = (site.page(Authorization=f"Bearer {key}") for key in "ab")
        assert site.page().get("state", 401)
        chat = ann.new_chat()
        assert bob.get("chats")["chats"] == []
        bob.get(f"chats/{chat}", 404)
        ann.post(f"chats/{chat}/messages", text="hi")
        assert backend.requests[0].memory == ann.get("state")["owner"] != ""
    with served(FakeBackend(), tmp_path / "b.db", host="0.0.0.0", is_one=False) as site:
        ann, bob = site.page(), site.page()
        assert "Ask for /page/state first" in ann.get("chats", 403)["error"]["message"]
        answer = ann.client.get("state")
        bob.get("state")
        for word in ("HttpOnly", "SameSite=strict"):
            assert word in answer.headers["set-cookie"]
        assert "set-cookie" not in ann.client.get("state").headers
        chat = ann.new_chat()
        assert [one["id"] for one in ann.get("chats")["chats"]] == [chat]
        assert bob.get("chats")["chats"] == []
        bob.get(f"chats/{chat}", 404)
    with served(FakeBackend(), tmp_path / "c.db") as site:
        answer = site.page().client.get("state")
        assert (answer.json()["owner"], "set-cookie" in answer.headers) == ("", False)


def test_other_sites_and_unknown_methods_are_refused_in_the_endpoints_form(
    written: tuple[Page, Written, Chats],
) -> None:
    page, _, _ = written
    own = str(page.client.base_url).removesuffix("/page/")
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:1"}, 403),  # enough for the endpoint
        ({"Host": "evil.example"}, 403),
        ({"Origin": own}, 200),
    ):
        answer = page.client.post("chats", json={}, headers=headers)
        assert answer.status_code == status, headers
        assert status == 200 or answer.json()["error"]["type"] == "permission_error"
        for path in ("state", "events"):
            if status == 403:
                with page.client.stream("GET", path, headers=headers) as answer:
                    assert answer.status_code == status
    assert httpx.put(f"{own}/page/chats").json()["error"]["code"] == 405
    assert httpx.get(f"{own}/page/nothing").json()["error"]["code"] == 404
    assert page.ask("PATCH", f"chats/{page.new_chat()}", title="Mine")["title"] == "Mine"


def test_chats_are_named_moved_copied_deleted_exported_and_imported(
    written: tuple[Page, Written, Chats],
) -> None:
    page, backend, _ = written
    chat, turns = talk(page, backend, "What's <up>?")
    assert page.get("search?q=up")["hits"][0]["html"] == "What&#x27;s &lt;<mark>up</mark>&gt;?"
    changed = page.ask("PATCH", f"chats/{chat}", is_pinned=True, folder="Work")
    assert (changed["title"], changed["is_pinned"]) == ("What's <up>?", True)
    assert page.get("state")["folders"] == ["Work"]
    copy = page.post(f"chats/{chat}/duplicate", turn=turns[0])
    assert [turn["text"] for turn in page.turns(copy["id"])] == ["What's <up>?"]
    assert [one["id"] for one in page.get("chats?folder=Work&before=" + chat)["chats"]] == [
        copy["id"]
    ]
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


def test_a_models_reply_can_be_replayed_and_raced(tiny_model: Path, tmp_path: Path) -> None:
    backend = LocalBackend()
    try:
        assert isinstance(list(backend.load(ModelSpec(str(tiny_model))))[-1], Loaded)
        with served(backend, tmp_path / "chats.db") as site:
            page = site.page()
            seq = page.get("state")["seq"]
            settings = {"method": "lookahead", "parameters": {"window": 3}, "max_tokens": 40}
            chat = page.new_chat(settings=settings)
            _, reply = page.say(chat, "one two three")
            shown = page.turns(chat)[-1]
            assert (shown["model"], shown["method"]) == ("tiny.gguf", "lookahead:window=3")
            replay = page.get(f"turns/{reply}/steps")
            assert len(replay["steps"]) == len(shown["cells"]) + 1
            assert replay["sources"] == ["lookahead"]
            n_tokens = sum(len(step[6]) + bool(step[7]) for step in replay["steps"])

            methods = ["ar", "lookahead"]
            race = page.post(f"turns/{reply}/race", methods=methods, rounds=1)["race"]
            told = races(page, seq, race)
            assert told[0]["progress"] == {
                "round": 0,
                "n_rounds": 1,
                "method": "ar",
                "n_tokens": 0,
            }
            assert told[-1]["result"]["same"]
            played = told[-1]["result"]["played"]
            assert [run["method"] for run in played] == ["ar", "lookahead:window=3"]
            n_said = [len([text for _, text, _ in run["tokens"] if text]) for run in played]
            assert n_said[0] == n_said[1] > 0
            assert len(played[0]["tokens"]) in (n_tokens, n_tokens + 1)  # with the end's token
            race = page.post("race", prompt="one", methods=methods, rounds=20)["race"]
            page.ask("DELETE", f"races/{race}")
            assert races(page, seq, race)[-1]["error"] == "The race was stopped."
            page.post("race", 400, prompt="one", methods=["ar", "x"])
    finally:
        backend.close()


def races(page: Page, after: int, race: str) -> list[dict[str, Any]]:
    """What is told of a race, to its end."""
    told = []
    for _, kind, data in page.stream(after):
        if kind == "race" and data["race"] == race:
            told.append(data)
            if "progress" not in data:
                return told
    raise AssertionError("the stream ended")


def test_the_models_state_is_told_when_it_changes(written: tuple[Page, Written, Chats]) -> None:
    page, backend, _ = written
    seq = page.get("state")["seq"]
    page.new_chat()
    for _, kind, data in page.stream(seq):
        if kind == "status":
            assert (data["model"]["name"], data["loading"]["done"]) == ("m.gguf", 7)
            break
        backend.state = Status(MODEL, Loading("x", "load", 7, 100))


def test_a_prompt_begins_with_a_greeting_or_a_message_and_counts_its_turns() -> None:
    turns = [
        Turn(1, "c", None, "assistant", "hello"),
        Turn(2, "c", 1, "user", "lost"),
        Turn(3, "c", 2, "assistant", ""),
        Turn(4, "c", 3, "user", "one"),
        Turn(5, "c", 4, "assistant", "re: one"),
        Turn(6, "c", 5, "assistant", "more"),
        Turn(7, "c", 6, "user", "two"),
    ]
    prompt = prompt_of(turns, "Be brief.")
    assert [message["content"] for message in prompt.messages] == [
        "Be brief.",
        "hello",
        "one",
        "re: one",
        "more",
        "two",
    ]
    assert prompt.starts == (1, 4, 7)
    assert (prompt.first_read(LeftOut(2, 99)), prompt.left_out(4, 99)) == (7, LeftOut(1, 99))
    assert (prompt.first_read(LeftOut()), prompt.left_out(3, 99)) == (None, LeftOut())
