"""Waiting for what another thread, process or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

SECONDS = 60.0
OFTEN = 0.005  # seconds between two looks
T = TypeVar("T")


def wait_until(found: Callable[[], T | None]) -> T:
    """What is found, as soon as it is true."""
    deadline = time.monotonic() + SECONDS
    while not (last := found()):
        assert time.monotonic() < deadline
        time.sleep(OFTEN)
    return last


async def until(holds: Callable[[], object]) -> None:
    """In a task, as long as its test lets it."""
    while not holds():
        await asyncio.sleep(OFTEN)
