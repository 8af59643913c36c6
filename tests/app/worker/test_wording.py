"""Errors in the words of the page."""

from __future__ import annotations

import asyncio
import warnings

import pytest

from app.worker.messages import ModelSpec
from app.worker.wording import FIELDS, in_page
from tests.support.fake_backend import FakeBackend

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from app.__main__ import parse_flags
    from app.page import model_panel, ui


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (
            "the context holds 256; shorten it (in the chat: Undo, or New chat) or raise "
            "--ctx (in the chat: Context under Model) to at least 300",
            "the context holds 256; shorten it (Undo, or New chat) or raise "
            "“Context” under Model (--ctx) to at least 300",
        ),
        (
            "lower --ctx (in the chat: Context under Model) or --gpu-layers, or use --kv-type q8_0",
            "lower “Context” under Model (--ctx) or --gpu-layers, or use --kv-type q8_0",
        ),
        (
            "give a file with --heads, or in the chat under Model, or use auto",
            "give a file with “Drafting heads” under Model (--heads), or use auto",
        ),
        (
            "give it with --heads, and that model with --model",
            "give it with “Drafting heads” under Model (--heads), "
            "and that model with “Model” under Model (--model)",
        ),
        ("lower --gpu-layers; /a--model/x--ctx --modelled", None),
    ],
)
def test_what_a_flag_sets_is_called_as_its_field_is(told: str, shown: str | None) -> None:
    assert in_page(told) == (shown or told)


def test_fields_and_flags_are_there() -> None:
    async def make() -> set[str]:
        with ui.gr.Blocks() as blocks:
            model_panel.ModelPanel(FakeBackend(), ModelSpec("m.gguf"))
        return {getattr(block, "label", None) or "" for block in blocks.blocks.values()}

    assert set(FIELDS.values()) <= asyncio.run(make())
    flags = vars(parse_flags([]))
    assert {flag.removeprefix("--").replace("-", "_") for flag in FIELDS} <= set(flags)
