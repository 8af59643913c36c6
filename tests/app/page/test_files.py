"""Files of a message: how they are read, kept and refused."""

from __future__ import annotations

import base64

import pytest

from app.page.prompt import with_files
from app.page.turns import turn_json
from app.store import Turn
from tests.support.fake_backend import DONE
from tests.support.page import Page, Written, said

FOX = {"name": "fox.txt", "text": "The fox.\nThe hen.", "leads": True}
HEN = {"name": "hen.md", "text": "```\nhen()\n```", "leads": False}
FOX_READ = "fox.txt:\n```\nThe fox.\nThe hen.\n```"
HEN_READ = "hen.md:\n````\n```\nhen()\n```\n````"


def test_the_model_reads_files_as_code_blocks_before_or_after_the_text() -> None:
    assert with_files("  Well?", ()) == "  Well?"
    assert with_files("Well?", (FOX,)) == f"{FOX_READ}\n\nWell?"
    assert with_files("Well?", (HEN,)) == f"Well?\n\n{HEN_READ}"
    assert with_files("Well?", (HEN, FOX)) == f"{FOX_READ}\n\nWell?\n\n{HEN_READ}"
    assert with_files("", (FOX, HEN)) == f"{FOX_READ}\n\n{HEN_READ}"


@pytest.mark.parametrize(
    ("n", "shown"), [(999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")]
)
def test_sizes_count_utf_8_bytes(n: int, shown: str) -> None:
    files = ({"name": "a", "text": "x" * n}, {"name": "b", "text": "é" * 3})
    told = turn_json(Turn(1, "", None, "user", "", files), (1,))["files"]
    assert [file["size"] for file in told] == [shown, "6 B"]


def test_files_and_pdfs_go_with_a_message_and_unreadable_ones_are_refused(
    page: Page, backend: Written
) -> None:
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
