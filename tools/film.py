"""Films a race of plain decoding and ``auto`` in the page, for ``tools.screenshot``.

The browser's own frames, at the times at which it showed them. Only the time in which the race is
measured is cut: the page plays it afterwards, as measured on this machine.
"""

from __future__ import annotations

import io
import time
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page

EDIT = "Change a line of code"  # a prompt of the start page
WAIT = 300_000  # ms
LEAST = 0.04  # seconds between two frames: what comes sooner takes the place of the one before
LAST = 2.5  # seconds for which the last frame stays


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
