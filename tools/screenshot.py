"""Takes ``screenshot.png`` and a film, ``race.webp``, of the page with the default model.

python -m tools.screenshot [--model NAME] [--threads N] [--out FOLDER]

The film has the browser's own frames, at the times at which it showed them. Only the time in which
the race is measured is cut: the page plays it afterwards, as measured on this machine.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from speculation.registry import default_model

ROOT = Path(__file__).parent.parent
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PICTURE, FILM = (1280, 800), (960, 700)
EDIT = "Change a line of code"  # a prompt of the start page
WAIT = 300_000  # ms
LEAST = 0.04  # seconds between two frames: what comes sooner takes the place of the one before
LAST = 2.5  # seconds for which the last frame stays


def main() -> None:
    parser = argparse.ArgumentParser(description="Take pictures of the page.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--threads", default="1")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "docs")
    flags = parser.parse_args()
    folder = flags.out
    folder.mkdir(parents=True, exist_ok=True)
    with serving(flags.model, flags.threads) as address, browser() as chromium:
        with opened(chromium, address, *FILM) as page:
            film(page, folder / "race.webp")
        with opened(chromium, address, *PICTURE) as page:
            ask(page)
            show_replay(page)
            page.wait_for_timeout(600)  # for the last transitions
            page.screenshot(path=folder / "screenshot.png")


def ask(page: Page) -> None:
    """Ask for a change of a file, and wait for the reply."""
    page.click(f".card:has-text('{EDIT}')")
    page.wait_for_selector("#turns .reply:not(.live) .actions", timeout=WAIT)


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


@dataclass
class Recording:
    """What the browser showed: images and when each appeared, in seconds since the epoch."""

    page: Page
    images: list[Image.Image] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def start(self) -> None:
        session = self.page.context.new_cdp_session(self.page)

        def keep(event: dict[str, Any]) -> None:
            session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})
            shown, image = event["metadata"]["timestamp"], b64decode(event["data"])
            if self.times and shown - self.times[-1] < LEAST:
                self.images.pop()  # the last frame is the one that stays
                shown = self.times.pop()
            self.images.append(Image.open(io.BytesIO(image)))
            self.times.append(shown)

        session.on("Page.screencastFrame", keep)
        session.send("Page.startScreencast", {"format": "png"})

    def cut(self, start: float, end: float) -> None:
        """Leave out what was shown in this time."""
        kept = [n for n, shown in enumerate(self.times) if not start <= shown < end]
        self.images = [self.images[n] for n in kept]
        times = [self.times[n] for n in kept]
        self.times = [shown if shown < start else shown - (end - start) for shown in times]


def film(page: Page, path: Path) -> None:
    """Race on a prompt of the start page, until the race has been played."""
    recording = Recording(page)
    page.wait_for_timeout(1000)  # until nothing moves
    recording.start()
    page.wait_for_timeout(1500)
    page.click(f"[aria-label='Race: {EDIT}']")
    page.wait_for_timeout(1000)
    measured = time.time()
    page.wait_for_selector(".lanes", timeout=WAIT)
    played = time.time()
    page.wait_for_selector(".verdict b", timeout=WAIT)
    page.wait_for_timeout(1000)
    recording.cut(measured, played)
    write(recording.images, recording.times, path)


def write(images: Sequence[Image.Image], times: Sequence[float], path: Path) -> None:
    seconds = [end - start for start, end in pairwise(times)] + [LAST]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[round(1000 * each) for each in seconds],
        loop=0,
        lossless=True,
        quality=70,
        method=4,
    )
    print(f"{path}: {len(images)} frames, {sum(seconds):.1f} s, {path.stat().st_size / 1e6:.2f} MB")


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
def opened(browser: Browser, address: str, width: int, height: int) -> Iterator[Page]:
    """The page, ready for a message."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    answer = page.goto(address)
    assert answer is not None and answer.ok, answer and answer.text()
    page.wait_for_selector("#gauge", state="visible", timeout=WAIT)
    page.wait_for_selector("#loading", state="hidden", timeout=WAIT)
    yield page
    page.close()


if __name__ == "__main__":
    main()
