"""``python -m app`` in a real browser: Chromium, driven by Playwright, on a tiny model.

CHROMIUM names the browser where it is not found under its usual names. Tests are skipped where it
or Playwright is missing. All share one server and one browser.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.browser.chat import Chat, served
from tests.support.tiny_gguf import write_tiny_gguf

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()

# What an earlier visit would have left.
SETTINGS = """
    if (location.protocol === "http:")
      localStorage["speculation:usual"] ??= '{"max_tokens": 60}';
"""


# Not session-scoped: while Playwright runs, no other test can run an event loop.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip(f"no Chromium: none of {NAMES} is here")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "long.gguf", n_ctx=32768)


@pytest.fixture(scope="package")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model, tmp_path_factory.mktemp("chats") / "chats.db") as (url, _):
        yield url


@pytest.fixture(scope="package")
def context(browser: Any) -> Iterator[Any]:
    made = browser.new_context(viewport={"width": 1280, "height": 800})
    made.add_init_script(SETTINGS)
    yield made
    made.close()


@pytest.fixture
def chat(context: Any, address: str) -> Iterator[Chat]:
    """A tab in a warm browser context, without what earlier tests left in the browser."""
    made = Chat(context, address)
    yield made
    errors = list(made.errors)
    session = context.new_cdp_session(made.page)
    session.send("Storage.clearDataForOrigin", {"origin": address[:-1], "storageTypes": "all"})
    for page in context.pages:
        page.close()
    context.clear_permissions()
    assert errors == []
