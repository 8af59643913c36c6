"""Tools in chats: who allows a call, what the model reads of it, and what servers cannot do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.worker.messages import Opening
from tests.support.fake_backend import DONE
from tests.support.page import Json, Page, Site, Written, served
from tests.support.paths import ROOT

SETTINGS: Json = {"tools": {"test": []}}


def offer(folder: Path, **kinds: str) -> None:
    """Write an ``mcp.json`` with these kinds of the test's server."""
    common = {"command": sys.executable, "cwd": str(ROOT), "env": {"KEY": "a secret key"}}
    servers = {
        name: {**common, "args": ["-m", "tests.support.mcp_server", kind]}
        for name, kind in kinds.items()
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))


def call(name: str, **arguments: Any) -> str:
    """A call in the generic form."""
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>"


def write(backend: Written, *parts: str) -> None:
    """Write a whole reply of a model that knows tools, once it has been asked for."""
    backend.write(Opening(""), *parts, DONE)


def asked(page: Page, backend: Written, chat: str, *parts: str, text: str = "do it") -> Json:
    """Send a message; returns the reply, which ends with calls."""
    n = len(backend.replies)
    page.post(f"chats/{chat}/messages", text=text)
    page.until(chat, lambda _: len(backend.replies) > n)
    write(backend, *parts)
    return page.until(chat, lambda turn: turn["state"] == "done")


def answer(page: Page, turn: Json, given: str, number: int = 0, status: int = 200) -> Any:
    return page.post(f"turns/{turn['id']}/calls/{number}", status, answer=given)


def endpoint(page: Page) -> str:
    return str(page.client.base_url.join("/v1/tools"))


def calls(turn: Json) -> list[tuple[str, str]]:
    return [(one["state"], one["result"]) for one in turn["calls"]]


def after(page: Page, turn: Json) -> Callable[[Json], bool]:
    """Whether the model goes on after a turn."""
    return lambda now: now["id"] != turn["id"] and now["parent"] == turn["id"]


@pytest.fixture(autouse=True)
def mcp(tmp_path: Path) -> None:
    offer(tmp_path, test="", other="")


def test_a_call_is_shown_before_it_is_made_and_the_model_reads_its_result(
    page: Page, backend: Written
) -> None:
    chat = page.new_chat(settings=SETTINGS)
    page.post(f"chats/{chat}/messages", text="say <b>")
    assert page.turns(chat)[-1]["notice"] in ("Starting the tools of test", "")
    page.until(chat, lambda _: backend.replies)
    names = [tool["function"]["name"] for tool in backend.requests[0].tools]
    assert names[:2] == ["test__echo", "test__env"]
    backend.write(Opening(""), "I shall say it.", "\n<tool")
    shown = page.until(chat, lambda turn: turn["blocks"])
    assert shown["blocks"] == ["<p>I shall say it.</p>\n"]
    backend.write('_call>\n{"name": "test__echo", "arguments": {"text": "<b>"')
    page.until(chat, lambda turn: turn["notice"] == "Calling test__echo")
    backend.write("}}\n</tool_call>", DONE)

    turn = page.until(chat, lambda turn: turn["state"] == "done")
    assert turn["text"] == "I shall say it."
    assert turn["calls"] == [
        {
            "name": "test__echo",
            "server": "test",
            "tool": "echo",
            "arguments": '{"text": "<b>"}',
            "state": "asked",
            "result": "",
            "is_error": False,
            "waits": True,
        }
    ]
    assert (turn["can_continue"], len(backend.requests)) == (False, 1)
    answer(page, turn, "once")
    page.until(chat, after(page, turn))
    assert calls(page.turns(chat)[1]) == [("done", "<b>")]
    page.until(chat, lambda _: len(backend.replies) == 2)
    given = backend.requests[1].messages
    made = {"name": "test__echo", "arguments": '{"text": "<b>"}'}
    id_ = f"call_{turn['id']}_0"
    assert given[1:] == (
        {
            "role": "assistant",
            "content": "I shall say it.",
            "tool_calls": [{"id": id_, "type": "function", "function": made}],
        },
        {"role": "tool", "tool_call_id": id_, "content": "<b>"},
    )
    write(backend, "Said.")
    end = page.until(chat, lambda turn: turn["state"] == "done")
    assert (end["text"], end["parent"], end["calls"]) == ("Said.", turn["id"], [])
    answer(page, turn, "once", status=409)
    document = page.client.get(f"chats/{chat}/export", params={"format": "md"}).text
    assert 'Calls of tools:\n```\n[\n  {\n    "name": "test__echo",' in document


def test_an_answer_for_all_calls_holds_for_one_tool_of_one_chat(
    page: Page, backend: Written
) -> None:
    chat, other = page.new_chat(settings=SETTINGS), page.new_chat(settings=SETTINGS)
    turn = asked(page, backend, chat, call("test__echo", text="one"), call("test__fail"))
    answer(page, turn, "always")
    turn = page.until(chat, lambda now: calls(now)[0] == ("done", "one") and now["state"] == "done")
    assert calls(turn)[1] == ("asked", "")
    answer(page, turn, "never", 1)
    page.until(chat, after(page, turn))
    page.until(chat, lambda _: len(backend.replies) == 2)
    results = [one["content"] for one in backend.requests[1].messages if one["role"] == "tool"]
    assert results == ["one", "The user does not allow this call."]

    write(backend, call("test__echo", text="two"), call("test__fail", text="two"))
    page.until(chat, lambda _: len(backend.replies) == 3)
    assert calls(page.turns(chat)[-2]) == [("done", "two"), ("denied", "")]
    write(backend, "Done.")
    assert calls(asked(page, backend, other, call("test__echo", text="x"))) == [("asked", "")]

    page.until(chat, lambda turn: turn["text"] == "Done.")
    page.ask("DELETE", f"chats/{chat}/answers")
    assert calls(asked(page, backend, chat, call("test__echo", text="x"))) == [("asked", "")]


def test_answers_are_kept_with_the_chat_but_not_with_its_copies(tmp_path: Path) -> None:
    backend, file = Written(), tmp_path / "chats.db"
    with served(backend, file) as site:
        page = site.page()
        chat = page.new_chat(settings=SETTINGS)
        turn = asked(page, backend, chat, call("test__echo", text="1"), call("test__fail"))
        answer(page, turn, "always")
        page.until(chat, lambda now: calls(now)[0] == ("done", "1") and now["state"] == "done")
        answer(page, turn, "never", 1)
        page.until(chat, after(page, turn))
        page.until(chat, lambda _: len(backend.replies) == 2)
        write(backend, "Done.")
        page.until(chat, lambda turn: turn["text"] == "Done.")
    with served(backend, file) as site:
        page = site.page()
        last = page.turns(chat)[-1]["id"]
        exported = page.client.get(f"chats/{chat}/export").text
        page.ask("DELETE", f"chats/{chat}")
        [added] = page.post("import", **json.loads(exported.replace("do it", "it")))["chats"]
        page.post(f"chats/{chat}/restore")
        copy = page.post(f"chats/{chat}/duplicate", turn=last)["id"]
        for other in (copy, added["id"]):
            assert calls(asked(page, backend, other, call("test__echo", text="2"))) == [
                ("asked", "")
            ]
        n = len(backend.replies)
        page.post(f"chats/{chat}/messages", text="do it")
        page.until(chat, lambda _: len(backend.replies) > n)
        write(backend, call("test__echo", text="2"), call("test__fail", text="2"))
        page.until(chat, lambda _: len(backend.replies) == n + 2)
        assert calls(page.turns(chat)[-2]) == [("done", "2"), ("denied", "")]


def test_resources_and_prompts_are_read_and_the_endpoint_lists_all_tools(
    page: Page, tmp_path: Path
) -> None:
    offer(tmp_path, test="", broken="broken")
    notes = page.post("tools/test/resources", own="memo://notes", arguments={})
    assert notes == {"texts": [{"name": "Notes", "text": "It is noon."}]}
    prompt, _ = page.post("tools/test/prompts", own="review", arguments={"code": "x"})["texts"]
    assert prompt == {"name": "review", "text": "Review x, kindly."}
    refused = page.post("tools/test/resources", 400, own="file:///etc/passwd", arguments={})
    told = "test offers no 'file:///etc/passwd' among its resources"
    assert refused["error"]["message"] == told
    page.post("tools/test/files", 400, own="memo://notes", arguments={})

    page.post("tools/test", again=True)
    found = page.get(endpoint(page))
    assert found["servers"] == [
        {"name": "test", "state": "on", "note": "1 of its resources are left out"},
        {"name": "broken", "state": "failed", "note": "no key was given"},
    ]
    assert len(found["data"]) == 11
    assert found["data"][0] == {
        "type": "function",
        "function": {
            "name": "test__echo",
            "description": "Says the text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }
    elsewhere = page.client.get(endpoint(page), headers={"sec-fetch-site": "cross-site"})
    assert elsewhere.status_code == 403
    (tmp_path / "mcp.json").write_text("{")
    assert "is not a list of MCP servers" in page.get(endpoint(page), 400)["error"]["message"]


def test_calls_that_cannot_be_made_are_told_to_the_model(page: Page, backend: Written) -> None:
    chat = page.new_chat(settings={"tools": {"test": ["fail"]}})
    page.post(f"chats/{chat}/messages", text="hi")
    page.until(chat, lambda _: backend.replies)
    write(backend, call("other__echo", text="x"), call("test__fail"))
    page.until(chat, lambda _: len(backend.replies) == 2)
    first, second = page.turns(chat)[1]["calls"]
    assert first["result"].startswith("There is no tool other__echo; call one of test__echo, ")
    assert second["result"].startswith("There is no tool test__fail; ")
    backend.write(Opening(""), '<tool_call>\n{"name": "test__echo", "arguments": {"text": ', DONE)
    cut = page.until(chat, lambda turn: turn["state"] == "done")
    assert (cut["calls"], cut["text"][:11]) == ([], "<tool_call>")


def test_stop_ends_a_call_which_can_be_made_again(page: Page, backend: Written) -> None:
    chat = page.new_chat(settings=SETTINGS)
    turn = asked(page, backend, chat, call("test__hang"))
    answer(page, turn, "once")
    page.until(chat, lambda now: calls(now) == [("running", "")])
    page.post(f"chats/{chat}/messages", 409, text="more")
    page.post(f"turns/{turn['id']}/stop")
    stopped = page.until(chat, lambda now: now["state"] == "done")
    assert (calls(stopped), stopped["calls"][0]["waits"]) == ([("stopped", "")], True)
    asked(page, backend, chat, "Hm.", text="go on")
    assert backend.requests[1].messages[2]["content"] == "The user stopped this call."
    answer(page, turn, "once", status=409)  # no longer the last


def test_a_call_survives_the_end_of_the_server(tmp_path: Path) -> None:
    for kind, before, state in (
        ("echo", [("asked", "")], "done"),
        ("hang", [("interrupted", "")], "interrupted"),
    ):
        backend, file = Written(), tmp_path / "chats.db"
        with served(backend, file) as site:
            page = site.page()
            chat = page.new_chat(settings=SETTINGS)
            turn = asked(page, backend, chat, call(f"test__{kind}", text="x"))
            if kind == "hang":
                answer(page, turn, "always")
                page.until(chat, lambda now: calls(now) == [("running", "")])
        with served(backend, file) as site:
            page = site.page()
            turn = page.turns(chat)[-1]
            assert (calls(turn), turn["state"]) == (before, state)
            if kind == "hang":
                offer(tmp_path, other="")  # this server is gone
            answer(page, turn, "once")
            page.until(chat, after(page, turn))
            [result] = page.turns(chat)[-2]["calls"]
            gone = f"there is no server 'test' in {tmp_path / 'mcp.json'}"
            assert result["result"] == ("x" if kind == "echo" else gone)


def test_an_import_brings_no_calls_that_are_allowed(page: Page, backend: Written) -> None:
    chat = page.new_chat(settings=SETTINGS)
    asked(page, backend, chat, *(call("test__echo", text=text) for text in "ab"))
    exported = page.client.get(f"chats/{chat}/export").text
    found = []
    for state in ("running", "allowed"):
        text = exported.replace('"asked"', f'"{state}"').replace("do it", state)
        [added] = page.post("import", **json.loads(text))["chats"]
        found.append(added["id"])
    assert [calls(page.turns(one)[-1]) for one in found] == [[("interrupted", "")] * 2, []]
    answer(page, page.turns(found[0])[-1], "once")
    page.until(found[0], lambda turn: calls(turn) == [("done", "a"), ("interrupted", "")])


def test_hostile_servers_keep_nobody_waiting_and_results_are_cut(
    page: Page, backend: Written
) -> None:
    number = 0

    def has_ended(now: Json) -> bool:
        return now["state"] == "done" and calls(now)[number][0] == "done"

    chat = page.new_chat(settings=SETTINGS)
    names = ("endless", "exit", "_x", "long")
    turn = asked(page, backend, chat, *(call(f"test__{name}", text="x") for name in names))
    assert [one["tool"] for one in turn["calls"]] == ["endless", "exit", "../../x", "long"]
    for number in range(4):
        if number == 2:
            page.post("tools/test", again=True)
        answer(page, turn, "once", number)
        page.until(chat, lambda now: now["id"] != turn["id"] or has_ended(now))
    results = [one["result"] for one in page.turns(chat)[1]["calls"]]
    assert results[:3] == ["test ended during the call", "test ended during the call", "x"]
    assert results[3].endswith("\n[cut: 149,349 of 150,000 characters are left out]")


def test_after_ten_rounds_or_the_same_call_again_the_model_has_to_answer(
    page: Page, backend: Written
) -> None:
    chat = page.new_chat(settings=SETTINGS)
    answer(page, asked(page, backend, chat, call("test__echo", text="0")), "always")
    for n in range(1, 10):
        page.until(chat, lambda _: len(backend.replies) > n)  # noqa: B023 (used at once)
        write(backend, call("test__echo", text=str(n)))
    page.until(chat, lambda _: len(backend.replies) == 11)
    assert [len(one.tools) for one in backend.requests[-2:]] == [11, 0]
    write(backend, call("test__echo", text="11"))
    last = page.until(chat, lambda turn: turn["state"] == "done")
    assert (last["calls"], last["text"][:11]) == ([], "<tool_call>")

    page.post(f"chats/{chat}/messages", text="again")
    for n in range(11, 13):
        page.until(chat, lambda _: len(backend.replies) > n)  # noqa: B023 (used at once)
        write(backend, call("test__echo", text="one"))
    page.until(chat, lambda _: len(backend.replies) == 14)
    assert calls(page.turns(chat)[-2]) == [("repeated", "")]
    assert [one["role"] for one in backend.requests[-1].messages][-3:] == [
        "user",
        "assistant",
        "tool",
    ]
    assert [len(one.tools) for one in backend.requests[-2:]] == [11, 0]


def test_a_server_is_listed_started_and_says_why_it_fails_without_its_keys(
    page: Page, backend: Written, tmp_path: Path
) -> None:
    offer(tmp_path, test="", many="many", broken="broken", leaky="leaky")
    listed = page.get("tools")
    assert listed["file"] == str(tmp_path / "mcp.json")
    assert {one["state"] for one in listed["servers"]} == {"off"}
    for name in ("many", "broken", "leaky"):
        listed = page.post(f"tools/{name}")
    _, many, broken, leaky = listed["servers"]
    assert (many["state"], len(many["tools"])) == ("on", 64)
    assert many["note"].startswith("9936 of its tools are left out; ")
    assert (broken["state"], broken["note"]) == ("failed", "no key was given")
    assert leaky["note"] == "the key [hidden] is wrong"
    assert "secret" not in json.dumps(listed)
    page.post("tools/unknown", 404)

    chat = page.new_chat(settings={"tools": {"broken": []}})
    _, turn = page.post(f"chats/{chat}/messages", text="hi")["turns"]
    failed = page.until(chat, lambda turn: turn["state"] == "done")
    assert failed["error"] == "broken cannot be used: no key was given"
    (tmp_path / "mcp.json").write_text("{")
    assert "is not a list of MCP servers" in page.get("tools", 400)["error"]["message"]
    page.post(f"turns/{turn['id']}/retry")
    failed = page.until(chat, lambda turn: turn["state"] == "done")
    assert "is not a list of MCP servers" in failed["error"]


def test_tools_are_for_who_may_use_files_and_calls_for_their_owner(
    backend: Written, tmp_path: Path
) -> None:
    with served(backend, tmp_path / "chats.db", host="0.0.0.0", keys=("a", "b"), is_one=False) as (
        site
    ):
        mine, other = (site.page(authorization=f"Bearer {key}") for key in "ab")
        chat = mine.new_chat(settings=SETTINGS, incognito=True)
        turn = asked(mine, backend, chat, call("test__echo", text="x"))
        answer(other, turn, "always", status=404)
        other.ask("DELETE", f"chats/{chat}/answers", 404)
        foreign = site.page(authorization="Bearer a", origin="http://evil.example")
        answer(foreign, turn, "once", status=403)
        answer(mine, turn, "once", number=1, status=409)
        answer(mine, turn, "perhaps", status=400)
        answer(mine, turn, "once")
        mine.until(chat, after(mine, turn))


def test_a_stranger_has_no_tools(site: Site, backend: Written, monkeypatch: Any) -> None:
    for module in ("page.owners", "page.routes", "mcp.routes"):
        monkeypatch.setattr(f"app.{module}.is_trusted", lambda *_: False)
    page = site.page()
    page.get("tools", 403)
    page.get(endpoint(page), 403)
    page.post("tools/test/resources", 403, own="memo://notes", arguments={})
    page.post("tools/test", 403)
    chat = page.new_chat(settings=SETTINGS)
    page.post(f"chats/{chat}/messages", 403, text="hi")
    assert page.turns(chat) == []
