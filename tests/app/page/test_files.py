"""Text files of a message: how they are read, saved and shown."""

from __future__ import annotations

import json

import pytest

from app.page.conversation import Conversation, markdown
from app.page.files import File, files_to_text, read_files, size_of, with_files
from app.page.render import turn_html
from app.page.saved import from_text, to_text
from app.worker.messages import Event, Tokens
from tests.support.fake_backend import DONE, FakeBackend, run, talk

FOX = File("fox.txt", "The fox.\nThe hen.")
HEN = File("hen.md", "```\nhen()\n```", leads=False)
FOX_READ = "fox.txt:\n```\nThe fox.\nThe hen.\n```"
HEN_READ = "hen.md:\n````\n```\nhen()\n```\n````"


def test_the_model_reads_files_as_code_blocks_before_or_after_the_text() -> None:
    assert with_files("  Well?", ()) == "  Well?"
    assert with_files("Well?", (FOX,)) == f"{FOX_READ}\n\nWell?"
    assert with_files("Well?", (HEN,)) == f"Well?\n\n{HEN_READ}"
    assert with_files("Well?", (HEN, FOX)) == f"{FOX_READ}\n\nWell?\n\n{HEN_READ}"
    assert with_files("", (FOX, HEN)) == f"{FOX_READ}\n\n{HEN_READ}"


def test_files_go_with_their_message_through_retry_edit_undo_and_export() -> None:
    conversation = talk("one")
    conversation.ask("Well?", (FOX,))
    script: list[Event] = [Tokens((("yes", False),)), DONE]
    backend = FakeBackend(*[script] * 3)
    run(conversation, backend)
    conversation.retry(1)
    run(conversation, backend)
    assert [r.messages[-1]["content"] for r in backend.requests] == [f"{FOX_READ}\n\nWell?"] * 2
    conversation.edit(1, "", (FOX, HEN))
    run(conversation, backend)
    assert backend.requests[2].messages[-1]["content"] == f"{FOX_READ}\n\n{HEN_READ}"
    assert f"## You\n\n{FOX_READ}\n\n{HEN_READ}\n\n## Model" in markdown(conversation)
    conversation.ask("two")
    assert conversation.messages()[2]["content"] == f"{FOX_READ}\n\n{HEN_READ}"
    conversation.undo()
    assert conversation.undo().files == (FOX, HEN)


def test_files_are_saved_and_chats_saved_before_files_existed_are_read() -> None:
    assert read_files(json.loads(files_to_text((FOX, HEN)))) == (FOX, HEN)
    conversation = talk("one")
    kept = json.loads(to_text(conversation))
    conversation.turns[0].files = (FOX, HEN)
    assert from_text(to_text(conversation)).turns == conversation.turns
    del kept[0]["files"]
    assert from_text(json.dumps(kept)).turns[0].files == ()
    kept[0]["files"] = [{"name": "fox.txt"}]
    assert from_text(json.dumps(kept)).turns == []


def test_the_page_gets_the_names_and_sizes_of_files_but_not_their_text() -> None:
    conversation = Conversation()
    conversation.ask("Well?", (File("<b>.txt", "The fox."), HEN))
    html = turn_html(conversation.turns[0], live=True, last=True)
    assert "The fox." not in html
    assert "<b>" not in html
    order = ["&lt;b&gt;.txt</bdi> <span>8 B</span>", "Well?", "hen.md"]
    assert sorted(order, key=html.index) == order


@pytest.mark.parametrize(
    ("n", "shown"), [(999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")]
)
def test_sizes_count_utf_8_bytes(n: int, shown: str) -> None:
    assert size_of("x" * n) == shown
    assert size_of("é" * 3) == "6 B"
