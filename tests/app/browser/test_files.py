"""Text files attached to a message: selected, dropped or pasted, and shown in its turn."""

from __future__ import annotations

from pathlib import Path

from tests.app.browser.chat import Chat

FOX = {"name": "fox.txt", "bytes": list(b"The fox.\nThe hen.\n")}
HEN = {"name": "hen.txt", "bytes": list(b"hen")}
READ = "fox.txt:\n```\nThe fox.\nThe hen.\n```"
DROP = """({kind, name, bytes, type, text, onto}) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name, {type}));
  if (text) transfer.items.add(text, "text/plain");
  const target = document.querySelector(
    onto ?? (kind === "paste" ? "#box textarea" : "#transcript")
  );
  const event = kind === "paste"
    ? new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true})
    : new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true});
  target.dispatchEvent(event);
  return event.defaultPrevented;
}"""


def wait_for_files(chat: Chat, *expected: str, place: str = "#entry") -> None:
    """Wait until these files are listed, by name and size."""
    chat.page.wait_for_function(
        "([place, expected]) => [...document.querySelectorAll(`${place} .files li`)]"
        ".map((li) => [...li.children].slice(0, 2).map((e) => e.textContent).join(' ')).join('|')"
        " === expected.join('|')",
        arg=[place, expected],
    )


def drop(chat: Chat, place: str = "#entry", **more: str) -> None:
    """Drop a file on the page, or ``onto`` an element, and wait until it is listed at a place."""
    chat.page.evaluate(DROP, {"kind": "drop", **FOX, **more})
    wait_for_files(chat, "fox.txt 17 B", place=place)


def choose(chat: Chat, *paths: Path) -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name="Add text files").click()
    chooser.value.set_files(paths)


def exported(chat: Chat) -> str:
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    return Path(download.value.path()).read_text(encoding="utf-8")


def test_selected_text_files_are_attached_and_others_refused(chat: Chat, tmp_path: Path) -> None:
    fox, hen, image, book = (tmp_path / name for name in ("fox.txt", "hen.md", "a.png", "b.txt"))
    fox.write_bytes("The fox.\r\nThe hen.\r\n".encode("utf-16"))
    hen.write_text("```\nhen()\n```")
    image.write_bytes(bytes(range(256)))
    book.write_text("word " * 2**18)
    chat.page.focus("#box textarea")
    chat.page.keyboard.type("Compare these.")
    choose(chat, fox, hen, image, book)
    wait_for_files(chat, "fox.txt 17 B", "hen.md 13 B")
    refused = chat.page.locator(".refused")
    refused.wait_for()
    assert refused.inner_text().splitlines() == [
        "a.png is not UTF-8 text; save it as plain text first",
        "b.txt is too large (1.3 MB): a message can have 1 MB of files, and 1.0 MB is left",
    ]
    chat.page.keyboard.press("Control+z")
    left = chat.page.input_value("#box textarea")
    assert left != "Compare these."
    assert "Compare these.".startswith(left)
    chat.page.keyboard.press("Control+Shift+z")
    chat.page.keyboard.type(" Well?")
    assert not refused.is_visible()
    assert chat.page.input_value("#box textarea") == "Compare these. Well?"
    chat.page.keyboard.press("Enter")
    chat.wait_for_reply()
    wait_for_files(chat)
    assert chat.page.input_value("#box textarea") == ""
    assert chat.last(".said") == "Compare these. Well?"
    hen_read = "hen.md:\n````\n```\nhen()\n```\n````"
    assert exported(chat).startswith(
        f"## You\n\nCompare these. Well?\n\n{READ}\n\n{hen_read}\n\n## Model"
    )
    choose(chat, book)
    chat.page.wait_for_selector(
        ".refused:has-text('b.txt is too large (1.3 MB): a message can have 1 MB of files')"
    )


def test_a_file_dropped_anywhere_or_pasted_into_the_box_is_attached(chat: Chat) -> None:
    assert chat.page.evaluate(DROP, {"kind": "dragover", **FOX})
    assert chat.page.locator("#entry.dropping").count() == 1
    assert chat.page.evaluate(DROP, {"kind": "drop", **FOX})
    wait_for_files(chat, "fox.txt 17 B")
    assert chat.page.locator("#entry.dropping").count() == 0
    assert chat.page.evaluate(DROP, {"kind": "paste", **HEN})
    wait_for_files(chat, "fox.txt 17 B", "hen.txt 3 B")
    chat.reload()
    wait_for_files(chat, "fox.txt 17 B", "hen.txt 3 B")
    chat.page.get_by_role("button", name="Remove hen.txt").click()
    wait_for_files(chat, "fox.txt 17 B")
    focused = "document.activeElement.ariaLabel ?? document.activeElement.closest('#box').id"
    assert chat.page.evaluate(focused) == "Remove fox.txt"
    chat.page.keyboard.press("Enter")
    wait_for_files(chat)
    assert chat.page.evaluate(focused) == "box"
    chat.reload()
    wait_for_files(chat)


def test_a_message_can_consist_of_files_only_and_can_be_undone(chat: Chat) -> None:
    drop(chat)
    chat.page.press("#box textarea", "Enter")
    chat.wait_for_reply()
    chat.page.wait_for_selector("#chats [data-open]:text-is('fox.txt')")
    chat.retry()
    chat.reload()
    chat.wait_for_reply()
    assert exported(chat).startswith(f"## You\n\n{READ}\n\n## Model")
    chat.undo()
    wait_for_files(chat, "fox.txt 17 B")
    assert chat.page.input_value("#box textarea") == ""
    chat.ask("And now?")
    assert exported(chat).startswith(f"## You\n\n{READ}\n\nAnd now?\n\n## Model")
    chat.page.evaluate(DROP, {"kind": "drop", **HEN})
    wait_for_files(chat, "hen.txt 3 B")
    chat.undo()  # which does not mix with what is unsent
    wait_for_files(chat, "hen.txt 3 B")
    assert chat.page.input_value("#box textarea") == ""


def test_an_opened_file_stays_open_while_the_reply_grows_and_can_be_copied(chat: Chat) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.never_end()
    drop(chat)
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    assert chat.page.locator(".file pre").count() == 0
    chat.page.press(".file summary", "Enter")  # which moves, as the reply grows
    text = chat.page.locator(".file pre")
    assert text.text_content() == "The fox.\nThe hen."
    chat.page.evaluate("document.querySelector('.file pre').isOld = true")
    length = len(chat.last(".text"))
    chat.page.wait_for_function(
        "(n) => document.querySelector('.live .text').textContent.length > n", arg=length + 100
    )
    assert chat.page.evaluate("document.querySelector('.file pre').isOld")
    chat.page.click("#box .stop-button")
    chat.wait_for_reply()
    chat.page.click(".file [data-action=copy-code]")
    chat.page.wait_for_selector("text=Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "The fox.\nThe hen."


def test_only_the_visible_part_of_a_long_file_is_laid_out(chat: Chat, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("abcd\n" * 200_000)
    choose(chat, long)
    wait_for_files(chat, "long.txt 1.0 MB")
    chat.page.press("#box textarea", "Enter")
    chat.page.wait_for_selector(".turn .error:has-text('the context holds 32768')")
    chat.page.click(".file summary")
    chat.page.wait_for_selector(".file pre > :nth-child(500)")
    unseen = chat.page.locator(".file pre > :nth-child(250)")
    assert unseen.evaluate("(block) => block.textContent.length") == 5 * 400 - 1
    assert unseen.inner_text() == ""  # it is not laid out


def test_a_file_dropped_onto_an_edited_message_is_attached_to_it(chat: Chat) -> None:
    chat.ask("a cat")
    chat.page.hover(".turn")
    chat.page.click("[data-action=edit]")
    drop(chat, place=".turn form", onto=".turn textarea")
    wait_for_files(chat)
    assert chat.page.input_value(".turn textarea") == "a cat"
    chat.page.press(".turn textarea", "Enter")
    chat.page.wait_for_selector(".turns:not(:has(.live)) .file")
    assert exported(chat).startswith(f"## You\n\na cat\n\n{READ}\n\n## Model")
    chat.page.click(".file summary")
    assert chat.page.text_content(".file pre") == "The fox.\nThe hen."
    chat.page.click("[data-action=edit]")
    chat.page.evaluate(DROP, {"kind": "drop", **HEN, "onto": ".turn textarea"})
    wait_for_files(chat, "fox.txt 17 B", "hen.txt 3 B", place=".turn form")
    chat.page.get_by_role("button", name="Remove fox.txt").click()
    chat.page.press(".turn textarea", "Enter")
    chat.page.wait_for_selector(".turns:not(:has(.live)) .file:has-text('hen.txt')")
    chat.page.wait_for_function(  # another file is in its place now
        "document.querySelector('.file pre')?.textContent === 'hen'"
    )


def test_pictures_and_folders_are_refused_with_a_reason(chat: Chat, tmp_path: Path) -> None:
    picture = {"kind": "paste", "name": "image.png", "bytes": [137, 80, 255], "type": "image/png"}
    assert not chat.page.evaluate(DROP, {**picture, "text": "1\t2"})
    assert not chat.page.is_visible(".refused")
    assert chat.page.evaluate(DROP, picture)
    chat.page.wait_for_selector(".refused:has-text('image.png is not UTF-8 text')")
    (tmp_path / "notes").mkdir()
    data = {"items": [], "files": [str(tmp_path / "notes")], "dragOperationsMask": 1}
    session = chat.context.new_cdp_session(chat.page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 600, "y": 300, "data": data})
    chat.page.wait_for_selector(".refused:has-text('notes cannot be read; of a folder, add its')")
