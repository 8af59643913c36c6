"""Takes ``docs/screenshot.png``: the app with the default model after the given messages.

python -m tools.screenshot [--model NAME] [--threads N] [--phone] [--dark] [message …]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from speculation.registry import default_model

ROOT = Path(__file__).parent.parent
MESSAGES = (
    "Hello!",
    "Repeat this text: The sun is hot. We like to play in the garden with Anna and Ben. In the "
    "evening we go home and eat bread with cheese.",
    "Say that once more.",
)
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take docs/screenshot.png.")
    parser.add_argument("messages", nargs="*", default=MESSAGES)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--threads", default="1")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", default=str(ROOT / "docs" / "screenshot.png"))
    flags = parser.parse_args()
    width, height = (390, 844) if flags.phone else (1280, 800)
    with (
        serving(flags.model, flags.threads) as address,
        opened(address, width, height, dark=flags.dark) as page,
    ):
        if not flags.phone:
            page.check("#compare input")
        for number, message in enumerate(flags.messages, 1):
            page.fill("#box textarea", message)
            page.press("#box textarea", "Enter")
            done = f".turns:not(:has(.live)) > :nth-child({number}):last-child .stats"
            page.wait_for_selector(done, timeout=120_000)
        page.wait_for_timeout(500)  # for the last transitions
        page.screenshot(path=flags.out)


@contextmanager
def serving(model: str, threads: str) -> Iterator[str]:
    """The app in a process of its own, and its address."""
    command = [sys.executable, "-m", "app", "--no-browser", "--model", model]
    command += ["--threads", threads]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as app:
        try:
            assert app.stdout is not None
            address = re.search(r"http://\S+", app.stdout.readline())
            assert address is not None
            yield address[0]
        finally:
            app.terminate()


@contextmanager
def opened(address: str, width: int, height: int, *, dark: bool = False) -> Iterator[Page]:
    """The page in a headless browser, ready for a message."""
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        page.goto(address)
        page.wait_for_selector("#header b")
        yield page
        browser.close()


if __name__ == "__main__":
    main()
