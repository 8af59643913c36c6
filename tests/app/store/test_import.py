"""Exports and imports: ours, ChatGPT's and Open WebUI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.store import Chat, Imported, Store, Turn, UnreadableExport, imports
from tests.app.store.test_store import exported, talk


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(":memory:")
    yield store
    store.close()


def taken(store: Store, owner: str, data: object) -> Imported:
    """Import JSON, as text or already read."""
    text = data if isinstance(data, str | bytes) else json.dumps(data)
    found, refused = imports.read(text, 5.0)
    return store.add(owner, [*found, *refused])


def shown(store: Store, chat: Chat) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn, _ in store.path(chat.id, "")]


def turns(store: Store, chat: Chat) -> list[Turn]:
    return [turn for turn, _ in store.path(chat.id, "")]


def test_an_export_has_all_of_a_chat_and_imports_once(store: Store) -> None:
    chat, (ask, reply, more) = talk(store, "ask", "reply", "more")
    files = [{"name": "a", "text": "A", "leads": True}]
    edited = store.add_turn(chat.id, "", None, "user", "é\n", files).id
    store.add_turn(chat.id, "", edited, "assistant", "half", reply={"runs": [[4, 1]]})
    store.add_turn(chat.id, "", edited, "assistant", "", state="running")
    store.save_steps(reply, b"\0steps")
    store.delete_turn(more, "")
    store.change_chat(chat.id, "", title="Mine", is_pinned=True)
    store.choose(ask, "")
    text = "".join(store.export_json(""))
    (whole,) = exported(store, "", chat.id)
    assert json.loads(text)["chats"] == [whole]
    assert [turn["text"] for turn in whole["turns"]] == ["ask", "reply", "é\n", "half", ""]

    assert taken(store, "", text).n_known == 1  # the chat that was exported is still there
    other = Store(":memory:")
    done = taken(other, "", text.encode())
    assert (done.n_known, done.refused) == (0, ())
    assert done.chats == tuple(other.chats("")) and done.chats[0].id == chat.id
    (again,) = exported(other)
    assert again["turns"][4].pop("state") == "interrupted"
    assert whole["turns"][4].pop("state") == "running"
    assert json.dumps(again) == json.dumps(whole)

    other.delete_chat(chat.id, "")
    assert (taken(other, "", text).chats, len(other.chats(""))) == ((), 1)
    foreign = taken(other, "someone else", text)  # whose chat gets an id of its own
    assert [one.title for one in foreign.chats] == ["Mine"]
    assert foreign.chats[0].id != chat.id
    other.add_turn(chat.id, "", None, "user", "new")
    assert taken(other, "", text).n_known == 1
    other.close()


def test_markdown_has_the_branch_that_is_shown(store: Store) -> None:
    chat, (ask, _) = talk(store, "ask", "dropped")
    reply = {"model": "m.gguf", "method": "auto", "opening": "<think>", "error": "It broke."}
    text = "so\n</think>\n\nYes:\n```python\nx"
    first = store.add_turn(chat.id, "", ask, "assistant", text, reply=reply)
    files = [{"name": "a.md", "text": "```\ncode\n```"}]
    store.add_turn(chat.id, "", first.id, "user", "Read this.", files)
    assert store.as_markdown(chat.id, "") == (
        "# ask\n\n## You\n\nask\n\n## Model\n\n<details><summary>Reasoning</summary>\n\nso\n\n"
        "</details>\n\nYes:\n```python\nx\n```\n\nIt broke.\n\n<sub>m.gguf · auto</sub>\n\n"
        "## You\n\na.md:\n````\n```\ncode\n```\n````\n\nRead this.\n"
    )


def node(parent: str | None, role: str = "", text: str = "", **more: Any) -> dict[str, Any]:
    """A node of ChatGPT's tree."""
    content = {"content_type": "text", "parts": [text]}
    message = {"author": {"role": role}, "content": content, "create_time": 7.5, **more}
    return {"message": message if role else None, "parent": parent, "children": []}


def test_chatgpts_tree_is_read_without_what_it_hides(store: Store) -> None:
    picture = {"content_type": "multimodal_text", "parts": [{"asset_pointer": "x"}, "What is it?"]}
    mapping = {
        "root": node(None),
        "system": node("root", "system", "hidden"),
        "ask": node("system", "user", "What is new?"),
        "first": node("ask", "assistant", "Nothing.", metadata={"model_slug": "gpt-4o"}),
        "thoughts": node("ask", "assistant", content={"content_type": "thoughts", "thoughts": []}),
        "look": node("thoughts", "assistant", "Let me look.", recipient="all"),
        "call": node("look", "assistant", "search()", recipient="web"),
        "result": node("call", "tool", "pages"),
        "answer": node("result", "assistant", "A lot \ue200cite\ue202turn0\ue201."),
        "more": node("answer", "user", "", content=picture),
        "loop": node("loop", "user", "never"),
    }
    about = {"title": "News", "create_time": 5.0, "update_time": 9.0, "conversation_id": "c"}
    file = [{**about, "mapping": mapping, "current_node": "more"}, {"mapping": {}}, {"mapping": 1}]
    done = taken(store, "", json.dumps(file))
    (chat,) = done.chats
    second, third = "Chat 2 (untitled): it has no messages.", "Chat 3 (untitled): it is damaged."
    assert done.refused == (second, third)
    assert (chat.title, chat.created_at, chat.changed_at) == ("News", 5.0, 9.0)
    assert shown(store, chat) == [
        ("user", "What is new?"),
        ("assistant", "Let me look.\n\nA lot ."),
        ("user", "(A picture or file was here.)\n\nWhat is it?"),
    ]
    assert turns(store, chat)[0].created_at == 7.5
    first, last = store.path(chat.id, "")[1][1]
    assert store.turn(first, "").reply == {"model": "gpt-4o"}
    assert store.choose(first, "").leaf == first
    assert last == first + 1
    assert (taken(store, "", file[:1]).chats, len(store.chats(""))) == ((), 1)


def test_open_webuis_tree_is_read_with_its_reasoning(store: Store) -> None:
    details = (
        '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds'
        "</summary>\n> Hm.\n> Yes.\n</details>\nYes."
    )
    messages = {
        "u": {"parentId": None, "role": "user", "content": "Is it?", "timestamp": 7},
        "a": {"parentId": "u", "role": "assistant", "content": details, "model": "qwen3"},
        "b": {"parentId": "u", "role": "assistant", "content": "No.", "model": "qwen3"},
    }
    history = {"messages": messages, "currentId": "a"}
    old = {"messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "ok"}]}
    about = {"id": "x", "title": "Is it", "created_at": 5, "updated_at": 9, "pinned": True}
    first = {**about, "chat": {"history": history, "params": {"system": "Be brief."}}}
    bad = {"id": "z", "title": "Bad", "chat": None}
    file = [first, {"id": "y", "chat": {"title": "Old", **old}}, bad]
    done = taken(store, "", file)
    chat, second = done.chats
    assert done.refused == ("Chat 3 (Bad): it is damaged.",)
    assert (chat.is_pinned, chat.changed_at, chat.settings) == (True, 9.0, {"system": "Be brief."})
    text = "<think>\nHm.\nYes.\n</think>\n\nYes."
    assert shown(store, chat) == [("user", "Is it?"), ("assistant", text)]
    assert turns(store, chat)[1].reply == {"model": "qwen3"}
    assert len(store.path(chat.id, "")[1][1]) == 2
    assert shown(store, second) == [("user", "old"), ("assistant", "ok")]


OURS = '{"format": "speculation-chats", "version": '
NONE = "it has no chats of this program, ChatGPT or Open WebUI"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("[1", "it is no export of chats"),
        ("[" * 100_000, "it is no export of chats"),
        (f"{OURS}3}}", "another version of this program wrote it"),
        (f"{OURS}2}}", "it has no chats"),
        ('[{"a": 1}]', NONE),
        ("[" + "{}," * 5_000_000, "it has more than 5,000,000 commas and brackets"),
        ("null", NONE),
    ],
)
def test_a_file_that_is_no_export_is_refused(store: Store, data: str, why: str) -> None:
    with pytest.raises(UnreadableExport, match=f"^{why}"):
        taken(store, "", data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((("leaf",), 9), (("settings",), []), (("created_at",), "x")),
        *((("changed_at",), float("nan")), (("turns", 0, "created_at"), 10**400)),
        *((("turns", 1, "parent"), 1), (("turns", 1, "parent"), -1)),
        *((("turns", 0, "role"), "system"), (("turns", 0, "text"), None)),
        *((("turns", 1, "state"), "gone"), (("turns", 1, "steps"), "*")),
        (("turns", 0, "files"), [{"name": "a"}]),
    ],
)
def test_a_damaged_chat_of_ours_is_refused_alone(
    store: Store, path: tuple[Any, ...], value: object
) -> None:
    talk(store, "ask", "reply")
    talk(store, "another")
    data = json.loads("".join(store.export_json("")))
    part = data["chats"][0]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    other = Store(":memory:")
    done = taken(other, "", data)
    assert [one.title for one in done.chats] == ["another"]
    assert done.refused == ("Chat 1 (ask): it is damaged.",)
    other.close()
