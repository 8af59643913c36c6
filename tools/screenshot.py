"""Takes pictures of the page with the default model: ``screenshot.png`` and a film, ``race.webp``.

python -m tools.screenshot [--model NAME] [--threads N] [--all FOLDER]

They are written to ``docs``. With ``--all``, a folder gets the film, and pictures of the main
states in both themes at three widths.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, Page, sync_playwright

from speculation.registry import default_model
from tools.film import EDIT, WAIT, film

ROOT = Path(__file__).parent.parent
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SIZES = {"desktop": (1280, 800), "tablet": (834, 1112), "phone": (390, 844)}
FILM = (960, 700)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take pictures of the page.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--threads", default="1")
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    flags = parser.parse_args()
    folder = flags.all or ROOT / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    with serving(flags.model, flags.threads) as address, browser() as chromium:
        with opened(chromium, address, FILM) as page:
            film(page, folder / "race.webp")
        with opened(chromium, address) as page:
            ask(page)
            if not flags.all:
                show_replay(page)
                picture(page, folder / "screenshot.png")
                return
        for theme in ("light", "dark"):
            for size in SIZES:
                with opened(chromium, address, size, theme) as page:
                    for name, state in STATES.items():
                        state(page)
                        if name != "chats" or size == "phone":  # others show them from the start
                            picture(page, folder / f"{name}-{size}-{theme}.png")


def picture(page: Page, path: Path) -> None:
    page.wait_for_timeout(600)  # for the last transitions
    page.screenshot(path=path)


def ask(page: Page) -> None:
    """Ask for a change of a file, and wait for the reply."""
    page.click(f".card:has-text('{EDIT}')")
    page.wait_for_selector("#turns .reply:not(.live) .actions", timeout=WAIT)


def show_chats(page: Page) -> None:
    if not page.query_selector("#left.open"):
        page.click("#show-chats")


def show_search(page: Page) -> None:
    page.fill("#search", "tax")
    page.wait_for_selector("#list .hit")


def show_reply(page: Page) -> None:
    page.fill("#search", "")
    page.click("#list .row:not(.hit) a >> nth=0")
    page.wait_for_selector("#turns .reply .actions")


def show_figures(page: Page) -> None:
    page.click("#turns .reply .speed [aria-label=Figures]")
    page.locator("#turns .reply > .actions").scroll_into_view_if_needed()


def show_replay(page: Page) -> None:
    page.click("#turns .reply .cells")
    page.wait_for_selector("#scrubber")
    show_step(page)


def show_step(page: Page) -> None:
    """Show the first step that accepted several drafts and rejected others."""
    page.mouse.move(0, 0)  # drafted text is filled while the mouse is on the bar
    page.focus("#scrubber")
    for _ in range(60):
        if page.locator("#tree b").count() > 1 and page.locator("#tree del").count() > 0:
            return
        page.keyboard.press("ArrowRight")


def show_settings(page: Page) -> None:
    page.click("#close-drawer")
    page.click("#show-settings")
    page.wait_for_selector("#thinking", state="attached")


def show_race(page: Page) -> None:
    page.click("#close-drawer")
    page.wait_for_timeout(600)
    page.hover("#turns .reply")
    page.click("#turns .reply [aria-label=Race]")
    page.click("dialog .primary")
    page.wait_for_selector(".verdict b", timeout=WAIT)


def show_models(page: Page) -> None:
    page.keyboard.press("Escape")
    page.click("#model")
    page.wait_for_selector(".model .more")


STATES: dict[str, Callable[[Page], None]] = {
    "start": lambda page: None,
    "chats": show_chats,
    "search": show_search,
    "reply": show_reply,
    "figures": show_figures,
    "replay": show_replay,
    "settings": show_settings,
    "race": show_race,
    "models": show_models,
}


@contextmanager
def serving(model: str, threads: str) -> Iterator[str]:
    """The app in a process of its own, without other chats; yields its address."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "app", "--no-browser", "--model", model]
        command += ["--threads", threads, "--chats", str(Path(folder) / "chats.db")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as app:
            try:
                assert app.stdout is not None
                address = re.search(r"http://\S+", app.stdout.readline())
                assert address is not None
                yield address[0]
            finally:
                app.terminate()


@contextmanager
def browser() -> Iterator[Browser]:
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def opened(
    browser: Browser, address: str, size: str | tuple[int, int] = "desktop", theme: str = "light"
) -> Iterator[Page]:
    """The page, ready for a message; ``size`` is a name or width and height."""
    width, height = SIZES[size] if isinstance(size, str) else size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
    )
    answer = page.goto(address)
    assert answer is not None and answer.ok, answer and answer.text()
    page.wait_for_selector("#gauge", state="visible", timeout=WAIT)
    page.wait_for_selector("#loading", state="hidden", timeout=WAIT)
    yield page
    page.close()


if __name__ == "__main__":
    main()
