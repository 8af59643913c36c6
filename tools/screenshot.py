"""Takes ``docs/screenshot.png``: the app with the default model after the given messages.

python -m tools.screenshot [--model NAME] [--threads N] [--phone] [--dark] [message …]

Without messages, it asks for a change of a file.
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
FILE = """\
import csv
from pathlib import Path

FOLDER = Path("orders")
TAX = 0.19


def read_orders(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def price(order):
    amount = int(order["amount"])
    return amount * float(order["price"])


def total(orders):
    net = sum(price(order) for order in orders)
    return round(net * (1 + TAX), 2)


def print_orders(orders):
    for order in orders:
        name = order["name"]
        print(f"{name:20} {price(order):10.2f}")
    print(f"{'total':20} {total(orders):10.2f}")


def main():
    for path in sorted(FOLDER.glob("*.csv")):
        print(path.name)
        print_orders(read_orders(path))


if __name__ == "__main__":
    main()
"""
EDIT = "Change the value of TAX to 0.21."
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take docs/screenshot.png.")
    parser.add_argument("messages", nargs="*")
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
        if not flags.messages:
            attach(page)
        for number, message in enumerate(flags.messages or [EDIT], 1):
            page.fill("#box textarea", message)
            page.press("#box textarea", "Enter")
            done = f".turns:not(:has(.live)) > :nth-child({number}):last-child .stats"
            page.wait_for_selector(done, timeout=120_000)
        page.wait_for_timeout(500)  # for the last transitions
        page.screenshot(path=flags.out)


def attach(page: Page) -> None:
    """Add the file to the next message."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add text files").click()
    chooser.value.set_files(
        {"name": "shop.py", "mimeType": "text/plain", "buffer": FILE.encode("utf-8")}
    )
    page.wait_for_selector("#files li")


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
