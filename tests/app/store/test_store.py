"""Chats: trees of turns, lists, search, presets, steps, owners."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from app.store import Chat, Hit, NoSuchChat, Store
from app.store.records import Role
from app.store.store import KEEP_DELETED
from tests.support.waiting import wait_until


class Clock:
    """A clock that is a second later whenever it is read."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    store = Store(":memory:", clock=clock)
    yield store
    store.close()


def texts(store: Store, chat: Chat) -> list[str]:
    return [turn.text for turn, _ in store.path(chat.id, "")]


def talk(store: Store, *said: str, owner: str = "") -> tuple[Chat, list[int]]:
    """A chat in which the user and the model speak in turn, and the turns' ids."""
    chat = store.new_chat(owner, {"method": "auto"})
    ids: list[int] = []
    roles: tuple[Role, Role] = ("user", "assistant")
    for n, text in enumerate(said):
        parent = ids[-1] if ids else None
        turn = store.add_turn(chat.id, owner, parent, roles[n % 2], text)
        ids.append(turn.id)
    return store.chat(chat.id, owner), ids


def search(store: Store, text: str, limit: int = 50) -> list[Hit]:
    return store.search("", text, limit).result()[0]


def exported(store: Store, owner: str = "", chat: str | None = None) -> list[dict[str, Any]]:
    return list(json.loads("".join(store.export_json(owner, chat)))["chats"])


def test_a_retry_and_an_edit_make_siblings_and_each_branch_can_be_shown_again(store: Store) -> None:
    chat, (ask, reply, _, end) = talk(store, "ask", "reply", "more", "end")
    retried = store.add_turn(chat.id, "", ask, "assistant", "retried")
    assert texts(store, chat) == ["ask", "retried"]
    assert [siblings for _, siblings in store.path(chat.id, "")] == [(ask,), (reply, retried.id)]
    edited = store.add_turn(chat.id, "", None, "user", "edited", [{"name": "a.txt", "text": "A"}])
    assert store.path(chat.id, "") == [(edited, (ask, edited.id))]
    assert edited.files == ({"name": "a.txt", "text": "A"},)
    assert store.choose(reply, "").leaf == end
    assert texts(store, chat) == ["ask", "reply", "more", "end"]
    assert store.choose(ask, "").leaf == retried.id
    assert [turn.text for turn, _ in store.path(chat.id, "", edited.id)] == ["edited"]


def test_a_long_chat_is_read_in_parts_from_its_end(store: Store) -> None:
    chat, ids = talk(store, *"abcdefg")
    assert [turn.text for turn, _ in store.path(chat.id, "", limit=3)] == ["e", "f", "g"]
    before = store.path(chat.id, "", before=ids[4], limit=3)
    assert [turn.text for turn, _ in before] == ["b", "c", "d"]
    assert store.path(chat.id, "", before=ids[0], limit=3) == []


def test_a_deleted_turn_takes_what_follows_with_it_and_comes_back_with_it(store: Store) -> None:
    chat, (ask, reply, more, end) = talk(store, "ask", "reply", "more", "end")
    retried = store.add_turn(chat.id, "", ask, "assistant", "retried").id
    store.choose(reply, "")
    assert store.delete_turn(end, "").leaf == more
    assert store.delete_turn(reply, "").leaf == retried
    assert store.path(chat.id, "")[1][1] == (retried,)
    with pytest.raises(NoSuchChat):
        store.restore_turn(end, "")  # its parent is deleted
    assert store.restore_turn(reply, "").leaf == more
    assert store.restore_turn(end, "").leaf == end
    assert store.delete_turn(retried, "").leaf == end  # another branch is shown
    assert store.delete_turn(ask, "").leaf is None
    assert texts(store, chat) == []
    assert store.restore_turn(ask, "").leaf == end
    assert store.path(chat.id, "")[1][1] == (reply,)


def test_chats_are_listed_pinned_first_then_latest(store: Store) -> None:
    a, b, c, d = (talk(store, name)[0].id for name in "abcd")
    store.change_chat(a, "", is_pinned=True)
    store.change_chat(c, "", settings={"method": "none"})
    store.add_turn(b, "", None, "user", "again")
    assert [chat.title for chat in store.chats("")] == ["a", "b", "d", "c"]
    assert [chat.id for chat in store.chats("", limit=2)] == [a, b]
    assert [chat.id for chat in store.chats("", before=b)] == [d, c]
    assert store.chat(c, "").settings == {"method": "none"}


def test_the_first_message_titles_a_chat_until_the_user_does(store: Store) -> None:
    chat, _ = talk(store, f"\n  {'x' * 90}\nmore", "reply", "next")
    assert (chat.title, chat.is_named) == ("x" * 80, False)
    named = store.change_chat(chat.id, "", title=" Mine ")
    assert (named.title, named.is_named) == ("Mine", True)
    unnamed = store.change_chat(chat.id, "", title=" ")
    assert (unnamed.title, unnamed.is_named) == ("x" * 80, False)
    files = store.new_chat("", {})
    store.add_turn(files.id, "", None, "user", "", [{"name": "a.txt", "text": ""}])
    assert store.chat(files.id, "").title == "a.txt"


def test_what_was_deleted_is_purged_after_a_day_to_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.store.PURGE_SECONDS", 0.01)
    now = 0.0
    store = Store(tmp_path / "chats.db", clock=lambda: now)
    chat, (first, _) = talk(store, "whale", "whale song")
    store.save_steps(first, b"whale steps")
    kept, (_, reply) = talk(store, "stays", "dolphin")
    more, _ = talk(store, "whale again")
    for one in (chat, more):
        store.delete_chat(one.id, "")
    store.delete_turn(reply, "")
    assert store.chats("") == [store.chat(kept.id, "")]
    assert search(store, "whale") == search(store, "dolphin") == []
    with pytest.raises(NoSuchChat):
        store.path(chat.id, "")
    store.close()
    now = KEEP_DELETED
    store = Store(tmp_path / "chats.db", clock=lambda: now)
    assert texts(store, store.restore_chat(chat.id, "")) == ["whale", "whale song"]
    assert [hit.turn is None for hit in search(store, "whale")] == [False, False]
    store.delete_chat(chat.id, "")

    def kept_bytes() -> bytes:
        return b"".join(path.read_bytes() for path in tmp_path.iterdir())

    assert b"whale" in kept_bytes() and b"dolphin" in kept_bytes()
    now = 2 * KEEP_DELETED + 1  # while it runs
    wait_until(lambda: b"whale" not in kept_bytes())
    with pytest.raises(NoSuchChat):
        store.restore_chat(chat.id, "")
    with pytest.raises(NoSuchChat):
        store.restore_turn(reply, "")
    assert b"dolphin" not in kept_bytes()
    assert texts(store, kept) == ["stays"]
    assert [hit.chat.id for hit in search(store, "stays")] == [kept.id]
    store.close()


def test_search_finds_titles_then_texts_with_all_words_and_marks_them(store: Store) -> None:
    tale = "A " + "long " * 40 + "tale of a skoda engine"
    chat, (ask, reply) = talk(store, "About Škoda cars", tale)
    hits = search(store, "SKODA")
    assert hits[0].snippet == "About \2Škoda\3 cars"
    assert hits[0].chat == store.chat(chat.id, "")
    hit = next(hit for hit in hits if hit.turn == reply)
    assert hit.snippet.startswith("…") and hit.snippet.endswith("tale of a \2skoda\3 engine")
    assert [hit.turn for hit in search(store, "gin tale")] == [reply]
    assert search(store, "tale engines") == []
    assert [hit.turn for hit in hits] == [ask, reply]
    assert [hit.turn for hit in search(store, "skoda", limit=2)] == [None, reply]
    assert [store.search("", "skoda", limit=n).result()[1] for n in (50, 1)] == [
        2,
        3,
    ]  # not all are seen
    assert search(store, "long")[0].snippet.endswith("\2long\3 \2long\3 lon…")
    running = store.add_turn(chat.id, "", reply, "assistant", "", state="running").id
    store.save_reply(running, "zebra", {}, "running")
    assert search(store, "zebra") == []
    store.save_reply(running, "zebra \2 stripes \ud800", {"n": 1}, "done")
    assert [hit.snippet for hit in search(store, "zebra")] == ["\2zebra\3  stripes ?"]
    store.save_reply(running, "horse", {}, "done")
    assert search(store, "zebra") == []
    assert [hit.turn for hit in search(store, "horse")] == [running]


def test_a_search_waits_for_no_other_work(tmp_path: Path) -> None:
    kept, begun, go_on = Store(tmp_path / "chats.db"), Event(), Event()
    _, (turn,) = talk(kept, "a whale")

    def work(_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    busy = kept.database.submit(work)
    assert begun.wait(60)
    assert [hit.turn for hit in kept.search("", "whale").result(60)[0]] == [turn]
    go_on.set()
    busy.result()
    kept.close()


def test_search_finds_words_of_scripts_without_spaces(store: Store) -> None:
    _, (first, chinese, japanese, thai, korean, english) = talk(
        store,
        "第一",
        "我想用Python编程。今天天气很好",
        "東京タワーへ行きました",
        "ฉันกินข้าวที่บ้าน",
        "한국어를 공부합니다",
        "使用 text in 2020年 and cafe\u0301",
    )

    def found(text: str) -> list[tuple[int | None, str]]:
        return [(hit.turn, hit.snippet) for hit in search(store, text)]

    assert found("编") == [(chinese, "我想用Python\2编\3程。今天天气很好")]
    assert found("天气") == [(chinese, "我想用Python编程。今天\2天气\3很好")]
    assert found("pyth") == [(chinese, "我想用\2Pyth\3on编程。今天天气很好")]
    assert found("京タ") == [(japanese, "東\2京タ\3ワーへ行きました")]
    assert found("ข้าว") == [(thai, "ฉันกิน\2ข้าว\3ที่บ้าน")]
    assert found("국어") == [(korean, "한\2국어\3를 공부합니다")]
    assert found("공부 한국") == [(korean, "\2한국\3어를 \2공부\3합니다")]
    assert found("使 202") == [(english, "\2使\3用 text in \x02202\x030年 and café")]
    assert [turn for turn, _ in found("用")] == [english, chinese]
    assert found("一")[0] == (first, "第\2一\3")
    assert found("CAFÉ") == [(english, "使用 text in 2020年 and \2café\3")]
    assert found("气天") == found("กนิ") == found("어국") == found("想 bython") == []


@pytest.mark.parametrize(
    "odd", ["", "  ", '"', "*", "a AND", "NEAR(", "title:x", "-a", "\0", "\ud800", "(" * 5000, "^"]
)
def test_no_search_raises(store: Store, odd: str) -> None:
    talk(store, "hello")
    assert search(store, odd) == []


def test_a_duplicate_has_the_turns_up_to_one(store: Store) -> None:
    chat, (ask, reply, _, _) = talk(store, "ask", "reply", "more", "end")
    store.add_turn(chat.id, "", ask, "assistant", "retried")
    store.save_steps(reply, b"steps")
    store.save_reply(reply, "reply", {"n": 1}, "running")
    copy = store.duplicate(chat.id, "", reply)
    assert (copy.title, copy.settings) == ("ask (copy)", {"method": "auto"})
    (first, _), (second, siblings) = store.path(copy.id, "")
    assert (first.text, second.text, second.reply) == ("ask", "reply", {"n": 1})
    assert (second.state, siblings) == ("interrupted", (second.id,))
    assert store.steps(second.id, "") == b"steps"
    assert texts(store, chat) == ["ask", "retried"]


def test_presets_are_kept_by_name(store: Store) -> None:
    brief = store.save_preset("", " brief ", {"system": "Be brief."})
    store.save_preset("", "auto", {})
    again = store.save_preset("", "brief", {"system": "Short."})
    assert (again.id, again.settings) == (brief.id, {"system": "Short."})
    assert [preset.name for preset in store.presets("")] == ["auto", "brief"]
    store.delete_preset("", brief.id)
    assert [preset.name for preset in store.presets("")] == ["auto"]


def test_the_oldest_steps_are_dropped_beyond_the_limit() -> None:
    store = Store(":memory:", most_step_bytes=10)
    _, (_, first, _, second, _, third) = talk(store, *"abcdef")
    for turn in (first, second, third):
        store.save_steps(turn, b"12345")
    assert [store.steps(turn, "") for turn in (first, second, third)] == [None, b"12345", b"12345"]
    store.save_steps(third, b"123456")
    assert store.steps(second, "") is None
    assert store.steps(third, "") == b"123456"
    with pytest.raises(NoSuchChat):
        store.save_steps(999, b"")
    store.close()


def test_owners_never_see_each_others_chats(store: Store) -> None:
    chat, (ask, reply) = talk(store, "secret", "reply", owner="ann")
    own, (own_ask,) = talk(store, "mine", owner="bob")
    store.save_steps(reply, b"steps")
    preset = store.save_preset("ann", "brief", {})
    forbidden: list[Callable[[], object]] = [
        lambda: store.chat(chat.id, "bob"),
        lambda: store.change_chat(chat.id, "bob", title="x"),
        lambda: store.delete_chat(chat.id, "bob"),
        lambda: store.restore_chat(chat.id, "bob"),
        lambda: store.duplicate(chat.id, "bob", reply),
        lambda: store.duplicate(own.id, "bob", reply),
        lambda: store.path(chat.id, "bob"),
        lambda: store.path(own.id, "bob", reply),
        lambda: store.path(own.id, "bob", before=reply),
        lambda: store.turn(ask, "bob"),
        lambda: store.add_turn(chat.id, "bob", reply, "user", "x"),
        lambda: store.add_turn(own.id, "bob", reply, "user", "x"),
        lambda: store.choose(ask, "bob"),
        lambda: store.delete_turn(ask, "bob"),
        lambda: store.restore_turn(ask, "bob"),
        lambda: store.steps(reply, "bob"),
        lambda: list(store.export_json("bob", chat.id)),
        lambda: store.as_markdown(chat.id, "bob"),
        lambda: store.delete_preset("bob", preset.id),
    ]
    for call in forbidden:
        with pytest.raises(NoSuchChat):
            call()
    assert [one.title for one in store.chats("bob")] == ["mine"]
    assert [one["title"] for one in exported(store, "bob")] == ["mine"]
    assert (store.search("bob", "secret").result(), store.presets("bob")) == (([], 0), [])
    assert store.chat(own.id, "bob").leaf == own_ask
    assert store.chat(chat.id, "ann") == chat
