"""The view of the last requests: their figures while they run and afterwards, and who sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.worker.messages import Asking, Drafting, Prefill, Report, Tokens
from tests.support.fake_backend import DONE
from tests.support.page import Page, Site, Written, served

SAID = "a secret"
CHAT = {"messages": [{"role": "user", "content": SAID}]}


def latest(page: Page, *names: str) -> list[list[Any]]:
    answer = page.client.get("requests")
    for word in (SAID, "reply", "key-"):
        assert word not in answer.text
    return [[one[name] for name in names] for one in answer.json()["requests"]]


def ask(page: Page, backend: Written, path: str = "../v1/chat/completions") -> None:
    """Ask the endpoint in a stream, write the reply, and read it."""
    with page.client.stream("POST", path, json={**CHAT, "stream": True}) as answer:
        backend.write("reply", DONE)
        answer.read()


def test_a_request_is_told_as_it_goes_on_and_with_its_figures_but_no_text(
    page: Page, backend: Written
) -> None:
    chat = page.new_chat()
    page.post(f"chats/{chat}/messages", text=SAID)
    names = ("route", "model", "n_prompt", "n_reused", "end")
    assert latest(page, *names) == [["chat", "m.gguf", 0, 0, "waiting"]]
    backend.write(Prefill(100, 227), Prefill(150, 227))
    page.until(chat, lambda turn: "150" in turn["notice"])
    assert latest(page, *names) == [["chat", "m.gguf", 150, 100, "reading, 150 of 228"]]
    backend.write(Tokens((("reply", True),), (7,)))
    page.until(chat, lambda turn: turn["blocks"])
    running = ("end", "n_tokens", "n_accepted", "is_running")
    assert latest(page, *running) == [["writing", 1, 1, True]]
    backend.write(DONE)
    page.until(chat, lambda turn: turn["state"] == "done")
    ended = ("n_prompt", "n_tokens", "n_accepted", "per_second", "end", "is_running")
    assert latest(page, *ended) == [[228, 84, 44, 83.0, "stop", False]]
    page.client.headers["User-Agent"] = "Tool/1.0 (more)"
    ask(page, backend)
    assert latest(page, "route", "client", "end")[0] == [
        "/v1/chat/completions",
        "127.0.0.1 Tool/1.0",
        "stop",
    ]
    assert len(latest(page, "route")) == 2


def test_who_shares_the_server_sees_the_own_requests_alone(tmp_path: Path) -> None:
    backend = Written()
    with served(backend, tmp_path / "a.db", keys=("key-a", "key-b"), is_one=False) as site:
        ann, bob = (site.page(Authorization=f"Bearer key-{key}") for key in "ab")
        ask(ann, backend)
        chat = bob.new_chat()
        bob.post(f"chats/{chat}/messages", text=SAID)
        assert latest(ann, "route") == [["/v1/chat/completions"]]
        assert latest(bob, "route") == [["chat"]]
    with served(backend, tmp_path / "b.db", host="0.0.0.0", is_one=False) as site:
        host = site.page()  # on the server's machine
        host.get("state")
        ask(site.page(), backend)
        assert latest(host, "route") == [["/v1/chat/completions"]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("app.page.routes.is_from_here", lambda http: False)
            assert latest(host, "route") == []


def test_what_is_known_of_drafts_is_that_of_the_loaded_model(
    site: Site, page: Page, backend: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Drafting(1, (2.5, 3.5), 42, (Asking("suffix", 1.5, 3.0, 4.0, True),))
    for load, told in ((1, [2.5, 3.5]), (2, None)):
        report = Report(drafting=replace(known, load=load))
        monkeypatch.setattr(backend, "report", lambda report=report: report)
        drafting = page.get("requests")["drafting"]
        assert (drafting and drafting["decode_ms"]) == told


def test_texts_are_kept_for_their_owner_alone_while_they_are_wanted(tmp_path: Path) -> None:
    backend, told = Written(), replace(DONE, prompt="<user>a secret")
    with served(backend, tmp_path / "a.db", is_one=False) as site:
        ann, bob = site.page(), site.page()
        for page in (ann, bob):
            page.get("state")

        def said(page: Page, who: Page = ann, status: int = 200, **body: Any) -> Any:
            """What is told of the texts of a new reply."""
            chat = page.new_chat(**body)
            page.post(f"chats/{chat}/messages", text=SAID)
            assert backend.requests[-1].show_prompt is (page is ann and keeps)
            backend.write(Tokens((("reply", True),), (7,)), told)
            page.until(chat, lambda turn: turn["state"] == "done")
            first = who.get("requests")["requests"][0]
            assert first["has_texts"] is (status == 200)
            return who.get(f"requests/{first['id']}", status)

        keeps = False
        said(ann, status=404)
        ann.post("requests/texts", keeps=True)
        keeps = True
        assert ann.get("requests")["keeps_texts"] is True
        assert bob.get("requests")["keeps_texts"] is False
        assert said(ann) == {"prompt": "<user>a secret", "reply": "reply"}
        number = ann.get("requests")["requests"][0]["id"]
        bob.get(f"requests/{number}", 404)
        said(bob, ann, 404)
        keeps = False
        said(ann, status=404, incognito=True)
        ann.post("requests/texts", keeps=False)
        ann.get(f"requests/{number}", 404)
        said(ann, status=404)
