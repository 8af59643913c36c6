"""Text files become part of the message: chosen, dropped or pasted."""

from __future__ import annotations

from pathlib import Path

from tests.browser.chat import Chat

QUOTED = "fox.txt:\n```\nThe fox.\nThe hen.\n```\n\n"
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


def wait_for_text(chat: Chat, text: str) -> None:
    chat.page.wait_for_function(
        "(text) => document.querySelector('#box textarea').value === text", arg=text
    )


def test_files_that_were_chosen_stand_in_the_message_and_others_are_refused(
    chat: Chat, tmp_path: Path
) -> None:
    fox, hen, image, book = (tmp_path / name for name in ("fox.txt", "hen.md", "a.png", "b.txt"))
    fox.write_bytes("The fox.\r\nThe hen.\r\n".encode("utf-16"))
    hen.write_text("```\nhen()\n```")
    image.write_bytes(bytes(range(256)))
    book.write_text("word " * 2**18)
    chat.page.fill("#box textarea", "Compare these.")
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name="Add text files").click()
    chooser.value.set_files([fox, hen, image, book])
    wait_for_text(chat, f"Compare these.\n\n{QUOTED}hen.md:\n````\n```\nhen()\n```\n````\n\n")
    refused = chat.page.locator(".refused")
    assert refused.inner_text().splitlines() == [
        "a.png is no text in UTF-8; save it as plain text first",
        "b.txt has 1.3 MB; 1 MB is the most that fits a message",
    ]
    chat.page.keyboard.type("Well?")
    assert not refused.is_visible()
    chat.page.keyboard.press("Enter")
    said = chat.page.locator(".turn .said").first
    said.wait_for()
    assert "The fox.\nThe hen." in said.inner_text()
    assert chat.errors == []


def test_a_file_that_is_dropped_anywhere_or_pasted_into_the_box_is_added(chat: Chat) -> None:
    file = {"name": "fox.txt", "bytes": list(b"The fox.\nThe hen.\n")}
    assert chat.page.evaluate(DROP, {"kind": "dragover", **file})
    assert chat.page.locator("#entry.dropping").count() == 1
    assert chat.page.evaluate(DROP, {"kind": "drop", **file})
    wait_for_text(chat, QUOTED)
    assert chat.page.locator("#entry.dropping").count() == 0
    assert chat.page.evaluate(DROP, {"kind": "paste", **file})
    wait_for_text(chat, QUOTED * 2)
    chat.reload()  # what is typed is kept, whoever typed it
    wait_for_text(chat, QUOTED * 2)


def test_text_that_was_copied_with_a_picture_of_it_is_pasted_as_text(chat: Chat) -> None:
    picture = {"kind": "paste", "name": "image.png", "bytes": [137, 80, 255], "type": "image/png"}
    assert not chat.page.evaluate(DROP, {**picture, "text": "1\t2"})
    assert not chat.page.is_visible(".refused")
    assert chat.page.evaluate(DROP, picture)
    chat.page.wait_for_selector(".refused:has-text('image.png is no text')")


def test_a_file_that_is_dropped_onto_a_message_being_edited_becomes_part_of_it(chat: Chat) -> None:
    chat.ask("a cat")
    chat.page.hover(".turn")
    chat.page.click("[data-action=edit]")
    file = {"kind": "drop", "name": "fox.txt", "bytes": list(b"The fox.\nThe hen.\n")}
    chat.page.evaluate(DROP, {**file, "onto": ".turn textarea"})
    chat.page.wait_for_function("document.querySelector('.turn textarea').value.length > 10")
    assert chat.page.input_value(".turn textarea") == f"a cat\n\n{QUOTED}"
    assert chat.page.input_value("#box textarea") == ""
    chat.page.click("[data-action=cancel]")


def test_of_a_folder_the_page_says_that_it_cannot_be_read(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    data = {"items": [], "files": [str(tmp_path / "notes")], "dragOperationsMask": 1}
    session = chat.context.new_cdp_session(chat.page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 600, "y": 300, "data": data})
    chat.page.wait_for_selector(".refused:has-text('notes cannot be read; of a folder add the')")
