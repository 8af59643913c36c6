"""Replies over HTTP: as jobs, what they read, what is kept of them, what the stream tells."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.page import jobs
from app.page.chats import Chats
from app.page.prompt import prompt_of
from app.store import Store, StoreError, Turn
from app.worker.messages import (
    Failed,
    LeftOut,
    Loaded,
    Loading,
    ModelFacts,
    ModelSpec,
    Node,
    Opening,
    Prefill,
    Status,
    StepRecord,
    Steps,
    Tokens,
    Waiting,
)
from tests.support.fake_backend import DONE, MODEL
from tests.support.local_backend import LocalBackend
from tests.support.page import Page, Written, said, served
from tests.support.waiting import wait_until


def test_a_reply_goes_on_without_a_page_and_can_be_stopped_and_continued(page: Page) -> None:
    chat = page.new_chat(settings={"method": "guess", "system": " Be brief. ", "half": "\ud83d"})
    _, reply = page.send(chat, "count\n")
    assert (reply["state"], reply["method"], reply["model"]) == ("running", "guess", "m")
    page.backend.write(Waiting(1), Prefill(512, 900))
    page.until(chat, lambda turn: turn["notice"] == "Reading the prompt: 512 of 900 tokens")
    page.backend.write("one ", Tokens((("two \ufffd", True),)))
    shown = page.until(chat, lambda turn: turn["blocks"])
    assert shown["blocks"] == ['<p>one <span class="drafted" data-n="1">two \ufffd</span></p>\n']
    assert page.get("chats")["chats"][0]["running"] == reply["id"]
    refused = page.post(f"chats/{chat}/messages", 409, text="more")["error"]["message"]
    assert refused == jobs.BUSY
    page.post(f"turns/{reply['id']}/stop")
    assert page.done(chat)["can_continue"]
    page.post(f"turns/{reply['id']}/continue")
    assert page.backend.requests[1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two "},
    )
    ended = page.reply(chat, "three")
    assert (ended["id"], ended["text"]) == (reply["id"], "one two three")
    assert ended["figures"][0] == ["Speed", "80 tokens/s"]
    assert (ended["can_continue"], ended["n_context"]) == (False, 312)
    page.post(f"turns/{reply['id']}/continue", 409)


def test_a_growing_reply_tells_its_speed_and_where_its_drafts_are_from(page: Page) -> None:
    chat = page.new_chat()
    page.send(chat, "Who?", files=[{"name": "x", "text": "a red hen"}])
    nodes = Node(-1, " red", "suffix"), Node(0, " hen", "suffix")
    step = StepRecord(1.0, 1.0, 1.0, 3, 1, nodes, (0, 1), "!")
    said = Tokens(((" red", True), (" hen", True), ("!", False)))
    page.backend.write("a", Steps((step,)), said)
    shown = page.until(chat, lambda turn: "hen" in str(turn["blocks"]))
    run = '<span class="drafted" data-n="2" data-from="copied from your file"> red hen</span>'
    assert shown["blocks"] == [f"<p>a{run}!</p>\n"]
    assert re.fullmatch(r"[\d.]+ tokens/s, 50% drafted", shown["sentence"])
    page.post(f"turns/{shown['id']}/stop")
    assert page.done(chat)["blocks"] == shown["blocks"]


def test_messages_without_a_reply_and_reasoning_are_left_out_of_later_prompts(page: Page) -> None:
    chat, _ = page.talk("one")
    page.send(chat, "failed")
    page.backend.write(Failed("no model"))
    failed = page.done(chat)
    assert (failed["error"], failed["can_continue"]) == ("no model", False)
    page.send(chat, "two")
    assert said(page.backend) == ["one", "re: one", "two"]
    reply = page.reply(chat, Opening("<think>\n"), "hm", "\n</think>\n\n", "**yes**")
    assert (reply["reasoning"], reply["text"]) == (["<p>hm</p>\n"], "**yes**")
    assert reply["blocks"] == ["<p><strong>yes</strong></p>\n"]
    page.send(chat, "three")
    assert said(page.backend) == ["one", "re: one", "two", "**yes**", "three"]
    assert page.backend.requests[-1].record


def test_the_first_turn_that_is_still_read_is_marked_and_kept(page: Page) -> None:
    chat, turns = page.talk("one", "two", "three")
    page.send(chat, "four")
    reply = page.reply(chat, LeftOut(2, 2048), "yes")
    assert reply["n_left_out"] == 2
    assert (reply["reads_from"], reply["n_ctx"]) == (turns[4], 2048)
    seq = page.get("state")["seq"]
    _, fifth = page.send(chat, "five")
    assert page.backend.requests[-1].left_out == LeftOut(2, 2048)
    page.backend.write(LeftOut(3, 2048), "yes", DONE)
    assert fifth["reads_from"] == turns[4]
    told = page.until_done(fifth["id"], seq)
    changes = [data.get("set", {}) for kind, data in told if kind == "turn"]
    assert {one["reads_from"] for one in changes if "reads_from" in one} == {reply["parent"]}


def test_the_stream_tells_what_a_page_that_is_loaded_again_shows(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SHOW_SECONDS", 0.05)
    chat, seq = page.new_chat(), page.get("state")["seq"]
    _, reply = page.send(chat, "hi")
    shown: dict[str, list[str]] = {"reasoning": [], "answer": []}
    thoughts, answer = ("<think>a", "b\n\nc</think>"), ("one\n", "\n- two", " **three\n")
    texts = iter([*thoughts, *answer, "\nfour", " **five"])
    n_parts = 0
    for _, kind, data in page.stream(seq):
        if kind == "turn" and "part" in data:
            begun = "".join(shown[data["part"]][data["from"] :][:1])[: data["same"]]
            first = [begun + one for one in data["blocks"][:1]]
            shown[data["part"]][data["from"] :] = [*first, *data["blocks"][1:]]
            n_parts += 1
        if kind == "turn" and data.get("set", {}).get("state") == "done":
            break
        if kind in ("turns", "turn"):
            page.backend.write(next(texts, DONE))
    (last,) = [turn for turn in page.turns(chat) if turn["id"] == reply["id"]]
    assert (last["reasoning"], last["blocks"]) == (shown["reasoning"], shown["answer"])
    assert shown["answer"][-1] == "<p>four **five</p>\n"
    assert n_parts > 4
    resumed = page.stream(None, last_id=str(seq + 2))
    assert [next(resumed)[0] for _ in range(3)] == [seq + 3, seq + 4, seq + 5]


@pytest.mark.parametrize(
    ("settings", "name", "told"),
    [
        ({"method": "gess"}, "method", "is 'gess'; give one of ar, auto, guess"),
        ({"method": "guess", "parameters": {"x": 1}}, "parameters.x", "guess has width, deep"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "temperature is -1"),
        ({"sampling": {"heat": 1}}, "sampling.heat", "is not one of the sampling settings"),
        ({"sampling": {"top_k": "a"}}, "sampling.top_k", "is 'a': Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens", "is -1: Input should be greater than or equal to 0"),
        ({"thinking": "yes"}, "thinking", "is 'yes': Input should be a valid boolean"),
        ({"leave_out": 1}, "leave_out", "is 1: Input should be a valid boolean"),
    ],
)
def test_invalid_settings_are_named_before_anything_is_written(
    page: Page, settings: dict[str, Any], name: str, told: str
) -> None:
    chat = page.new_chat(settings={"method": "guess"})
    given = {"method": "ar", **settings}
    error = page.post(f"chats/{chat}/messages", 400, text="hi", settings=given)["error"]
    assert (error["param"], told in error["message"]) == (name, True), error
    assert page.turns(chat) == []


def test_settings_are_kept_as_given_and_the_engine_gets_what_it_knows(page: Page) -> None:
    chat = page.new_chat(settings={"method": "guess"})
    sampling = {"temperature": 0.5, "seed": 7}
    good = {"method": "guess", "parameters": {"width": 5, "deep": False}, "max_tokens": 0}
    good |= {"sampling": {**sampling, "grammar": " "}, "colour": "of the page"}
    page.send(chat, "hi", settings=good)
    request = page.backend.requests[0]
    assert request.method == "guess:width=5,deep=off"
    assert (request.sampling, request.max_tokens) == (sampling, None)
    assert page.get(f"chats/{chat}")["chat"]["settings"] == good


def test_sampling_is_the_models_and_another_reply_is_another_text(page: Page) -> None:
    facts = ModelFacts(sampling={"temperature": 0.6, "top_k": 20})
    page.backend.state = Status(MODEL, facts=facts)
    chat, (_, reply) = page.talk("hi")

    def sampling(how: str = "again", **settings: Any) -> dict[str, Any]:
        page.post(f"turns/{reply}/retry", how=how, settings=settings)
        page.reply(chat, "re")
        return dict(page.backend.requests[-1].sampling)

    first, second = dict(page.backend.requests[0].sampling), sampling()
    assert {**first, "seed": 0} == {**second, "seed": 0} == {**facts.sampling, "seed": 0}
    assert first["seed"] != second["seed"]
    kept = dict(page.turns(chat)[-1]["figures"])["Sampling"]
    assert kept == f"temperature 0.6, seed {second['seed']}"
    fixed = {"seed": 7, "temperature": 0}
    assert sampling(sampling=fixed) == {**fixed, "top_k": 20}
    assert sampling("freer")["temperature"] == pytest.approx(0.9)
    assert sampling("stricter")["temperature"] == pytest.approx(0.3)
    assert sampling("plain", method="guess", parameters={"width": 9})["top_k"] == 20
    assert page.backend.requests[-1].method == "ar"
    assert page.get(f"chats/{chat}")["chat"]["settings"]["method"] == "guess"
    page.backend.state = Status(MODEL)  # which recommends nothing
    found = [sampling(how).get("temperature") for how in ("again", "freer", "stricter")]
    assert found == [0.7, 0.7, 0.0]
    page.post(f"turns/{reply}/retry", 400, how="x")


def test_replies_that_run_when_the_server_ends_are_kept_as_interrupted(tmp_path: Path) -> None:
    with served(Written(), tmp_path / "chats.db") as site:
        page, chats = site.page(), site.chats
        chat = page.new_chat()
        page.send(chat, "count")
        page.backend.write("one ", "two")
        page.until(chat, lambda turn: turn["blocks"])
        chats.jobs.close()
        kept = chats.kept.path(chat, "")[-1][0]
        assert (kept.text, kept.state) == ("one two", "interrupted")
    with served(Written(), tmp_path / "chats.db") as site:
        page = site.page()
        last = page.turns(chat)[-1]
        assert (last["state"], last["can_continue"]) == ("interrupted", True)
        page.post(f"turns/{last['id']}/continue")
        assert said(page.backend) == ["count", "one two"]


def test_a_reply_is_saved_twice_a_second_and_again_when_the_disk_has_room(
    page: Page, chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = page.new_chat()
    seq = page.get("state")["seq"]
    _, reply = page.send(chat, "hi")
    page.backend.write("one")
    wait_until(lambda: chats.kept.turn(reply["id"], "").text)
    save, full = Store.save_reply, "Chats cannot be kept: the disk is full."
    is_full = [True]

    def save_reply(self: Store, *arguments: Any) -> None:
        if is_full[0]:
            raise StoreError(full)
        save(self, *arguments)

    monkeypatch.setattr(Store, "save_reply", save_reply)
    page.backend.write(" two", DONE)
    page.until(chat, lambda turn: turn["error"] == full)
    page.post(f"chats/{chat}/messages", 409, text="more")
    is_full[0] = False
    assert page.until_done(reply["id"], seq)[-1][1]["set"]["error"] == ""
    assert chats.kept.turn(reply["id"], "").text == "one two"


def test_a_message_in_a_chat_of_150_turns_costs_its_own_text(
    page: Page, chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
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
                page.backend.write(Tokens(((f"word {n_shown}, ", False), ("and more ", True))))
            elif n_shown == 100:
                page.backend.write(DONE)
            if line.startswith("data: ") and json.loads(line[6:]).get("set", {}).get("sentence"):
                break
        n_down += answer.num_bytes_downloaded
    assert n_shown > 90
    assert n_up < 10_000
    assert n_down < 60_000


def test_a_message_is_one_transaction(
    page: Page, chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, n = page.new_chat(), 0
    submit = chats.kept.database.submit

    def counted(work: Any) -> Any:
        nonlocal n
        n += 1
        return submit(work)

    monkeypatch.setattr(chats.kept.database, "submit", counted)
    page.post(f"chats/{chat}/messages", text="hi", settings={"method": "guess"})
    assert n == 1


def test_a_models_reply_can_be_replayed_and_raced(tiny_model: Path, tmp_path: Path) -> None:
    backend = LocalBackend()
    assert isinstance(list(backend.load(ModelSpec(str(tiny_model))))[-1], Loaded)
    with closing(backend), served(backend, tmp_path / "chats.db") as site:
        page = site.page()
        seq = page.get("state")["seq"]
        settings = {"method": "lookahead", "parameters": {"window": 3}, "max_tokens": 40}
        chat = page.new_chat(settings=settings)
        _, reply = page.say(chat, "one two three")
        shown = page.turns(chat)[-1]
        assert (shown["model"], shown["method"]) == ("tiny", "lookahead:window=3")
        replay = page.get(f"turns/{reply}/steps")
        assert len(replay["steps"]) == len(shown["cells"]) + 1
        assert replay["sources"] == ["lookahead"]
        n_tokens = sum(len(step[6]) + bool(step[7]) for step in replay["steps"])

        methods = ["ar", "lookahead"]
        race = page.post(f"turns/{reply}/race", methods=methods, rounds=1)["race"]
        told = races(page, seq, race)
        begun = {"round": 0, "n_rounds": 1, "method": "ar", "lane": 0}
        assert told[0]["progress"] == {**begun, "n_tokens": 0, "left": None, "tokens": []}
        assert (told[-2]["result"]["texts"], told[-1]["end"]) == ("Same text ✓", "")
        played = told[-2]["result"]["played"]
        assert [run["method"] for run in played] == ["ar", "lookahead:window=3"]
        now = [one["progress"] for one in told if "progress" in one]
        for lane, run in enumerate(played):
            live = [text for one in now if one["lane"] == lane for text, _ in one["tokens"]]
            times, said, _ = zip(*run["tokens"], strict=True)
            assert "".join(live) == "".join(said) != ""
            assert sorted(times) == [*times]
        assert len(played[0]["tokens"]) in (n_tokens, n_tokens + 1)  # with the end's token
        race = page.post("race", prompt="one", methods=methods, rounds=20)["race"]
        page.ask("DELETE", f"races/{race}")
        told = races(page, seq, race)
        has_result = any("result" in one for one in told)
        assert told[-1]["end"] == ("" if has_result else "The race was stopped.")
        page.post("race", 400, prompt="one", methods=["ar", "x"])


def races(page: Page, after: int, race: str) -> list[dict[str, Any]]:
    """What is told of a race, to its end."""
    told = []
    for _, kind, data in page.stream(after):
        if kind == "race" and data["race"] == race:
            told.append(data)
            if "end" in data:
                return told
    raise AssertionError("the stream ended")


def test_a_change_of_the_models_state_reaches_a_page_that_opens_its_stream_later(
    page: Page,
) -> None:
    for done in (7, 8):
        shown = page.get("state")
        page.backend.state = Status(MODEL, Loading("x", "load", done, 100))
        told = next(data for _, kind, data in page.stream(shown["seq"]) if kind == "status")
        assert (told["model"]["name"], told["loading"]["done"]) == ("m", done)
    assert page.get("state")["status"] == told


def test_a_prompt_begins_with_a_greeting_or_a_message_and_counts_its_turns() -> None:
    said = ["hello", "lost", "", "one", "re: one", "more", "two"]
    roles: list[Any] = ["assistant", "user"] * 2 + ["assistant", "assistant", "user"]
    turns = [
        Turn(n, "c", n - 1 or None, role, text)
        for n, (role, text) in enumerate(zip(roles, said, strict=True), 1)
    ]
    prompt = prompt_of(turns, "Be brief.")
    read = [message["content"] for message in prompt.messages]
    assert read == ["Be brief.", "hello", "one", "re: one", "more", "two"]
    assert prompt.starts == (1, 4, 7)
    assert (prompt.first_read(2), prompt.left_out(4, 99)) == (7, LeftOut(1, 99))
    assert (prompt.first_read(0), prompt.left_out(3, 99)) == (None, LeftOut())
    thinks = Turn(8, "c", 7, "assistant", "hm", reply={"opening": "<think>\n"})
    assert prompt_of([*turns, thinks]).messages[-1]["content"] == "<think>\nhm"
