"""Export of all chats to a file, and import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.app.browser.chat import Chat
from tests.app.browser.test_history import titles
from tests.app.browser.test_store import fill, turns


def export_all(chat: Chat, path: Path) -> dict[str, Any]:
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Export all").click()
    assert download.value.suggested_filename.startswith("chats-")
    download.value.save_as(path)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def import_file(chat: Chat, path: Path) -> str:
    """Import a file; return the page's message."""
    chat.page.evaluate("document.querySelector('#chats .status').textContent = ''")
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name="Import", exact=True).click()
    chooser.value.set_files(path)
    chat.page.wait_for_selector("#chats .status:not(:empty)")
    return str(chat.page.inner_text("#chats .status"))


def test_all_chats_are_exported_to_one_file_and_imported_again(chat: Chat, tmp_path: Path) -> None:
    for said in ("a cat", "a “dog”\n</script>"):
        chat.ask(said)
        chat.page.wait_for_selector("#chats [aria-current]")
        chat.new_chat()
    chat.wait_for_titles("a “dog” </script>", "a cat")
    chat.page.get_by_role("button", name="Rename a cat").click()
    chat.page.keyboard.type("Of cats")
    chat.page.keyboard.press("Enter")
    chat.wait_for_titles("a “dog” </script>", "Of cats")
    kept = chat.kept()
    data = export_all(chat, tmp_path / "chats.json")
    assert chat.page.inner_text("#chats .status") == "Exported 2 chats."
    assert (data["format"], data["version"]) == ("speculation-chats", 1)
    assert [(c["title"], c["named"]) for c in data["chats"]] == [
        ("a “dog” </script>", False),
        ("Of cats", True),
    ]
    assert [c["turns"] for c in data["chats"]] == [json.loads(text) for text in kept]

    chat.answer_dialogs()
    chat.page.get_by_role("button", name="Delete Of cats").click()
    chat.wait_for_titles("a “dog” </script>")
    said = import_file(chat, tmp_path / "chats.json")
    assert said == "Imported 1 chat; 1 chat already here, unchanged or newer."
    chat.wait_for_titles("a “dog” </script>", "Of cats")
    assert [json.loads(text) for text in chat.kept()] == [json.loads(text) for text in kept]
    chat.page.click("#chats [data-open]:has-text('Of cats')")
    chat.page.wait_for_selector(".said:text-is('a cat')")
    chat.wait_for_reply()
    chat.settle()
    chat.saved()
    dates = "store.list().then((list) => list.map(({ at }) => at))"
    assert chat.page.evaluate(dates) == [c["at"] for c in data["chats"]]  # opening changes none


def test_neither_an_import_nor_an_older_tab_replaces_a_newer_chat(
    chat: Chat, tmp_path: Path
) -> None:
    chat.ask_saved("a cat")
    data = export_all(chat, tmp_path / "chats.json")
    (one,) = data["chats"]
    chat.ask("a dog", 2)
    chat.page.wait_for_function(f"store.list().then(([chat]) => chat.at > {one['at']})")
    assert import_file(chat, tmp_path / "chats.json") == (
        "Imported 0 chats; 1 chat already here, unchanged or newer."
    )
    newer = {**one, "at": one["at"] * 2, "turns": json.loads(turns("a cat", "a fox"))}
    (tmp_path / "newer.json").write_text(json.dumps({**data, "chats": [newer]}))
    assert import_file(chat, tmp_path / "newer.json") == "Imported 1 chat."
    chat.ask("a hen", 3)
    chat.wait_for_titles("a cat", "a cat")
    assert chat.kept_messages() == [["a cat", "a dog", "a hen"], ["a cat", "a fox"]]


def one_chat(name: str, at: object, **more: object) -> dict[str, Any]:
    return {"name": name, "title": name, "at": at, "turns": json.loads(turns(name)), **more}


def export_of(*chats: dict[str, Any]) -> str:
    return json.dumps({"format": "speculation-chats", "version": 1, "chats": chats})


UNREADABLE = {
    '{"format": "speculation-chats", "ver': "it is not JSON or is incomplete",
    "[1]": "it is not an export of chats",
    '{"format": "speculation-chats", "version": 2, "chats": []}': "a newer version of this",
    '{"format": "speculation-chats", "version": 1}': "it has no chats",
    export_of(
        one_chat("a", 1), one_chat("b", 1, turns=[{"user": "b", "reply": 3}])
    ): "its chat 2 has turns that cannot be read",
}


def test_nothing_is_imported_from_an_unreadable_file_and_the_page_says_why(
    chat: Chat, tmp_path: Path
) -> None:
    for i, (text, why) in enumerate(UNREADABLE.items()):
        (tmp_path / f"{i}.json").write_text(text)
        said = import_file(chat, tmp_path / f"{i}.json")
        assert said.startswith(f"{i}.json cannot be imported: {why}")
    assert titles(chat) == []


def test_a_chat_without_a_valid_date_is_not_imported_but_listed_if_it_is_stored(
    chat: Chat, tmp_path: Path
) -> None:
    chat.answer_dialogs()
    chat.ask("a cat")
    for i, at in enumerate((1e300, -1, "1", None)):
        one = one_chat("a", at)
        (tmp_path / f"{i}.json").write_text(export_of(one))
        assert import_file(chat, tmp_path / f"{i}.json") == (
            f"{i}.json cannot be imported: its chat 1 has no valid name, title or date."
        )
        chat.page.evaluate("([chat, text]) => store.add(chat, text)", [one, turns("a")])
        chat.reload()
        chat.wait_for_titles("a cat", "a")
        chat.page.get_by_role("button", name="Delete a", exact=True).click()
        chat.wait_for_titles("a cat")


def test_beyond_1000_chats_a_new_one_replaces_the_oldest_but_an_import_none(
    chat: Chat, tmp_path: Path
) -> None:
    fill(chat, 999, 1)
    (tmp_path / "chats.json").write_text(export_of(one_chat("a fox", 1), one_chat("a hen", 2)))
    assert import_file(chat, tmp_path / "chats.json") == "Imported 1 chat; no room for 1 chat."
    chat.page.wait_for_selector("#chats li:last-child [data-open]:text-is('a hen')")
    assert chat.page.locator("#chats li").count() == 1000
    chat.ask("a cat")
    chat.page.wait_for_selector(".refused:has-text('deleted the oldest chat, “a hen”')")
    assert len(chat.page.evaluate("store.list()")) == 1000
