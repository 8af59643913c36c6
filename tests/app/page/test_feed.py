"""The stream's events: who gets which, and what slow and late readers miss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from app.page import feed
from app.page.feed import Feed


async def read(events: AsyncIterator[bytes], n: int) -> list[str]:
    """The next events as ``kind data``; comments as they are."""
    found = []
    for _ in range(n):
        text = (await asyncio.wait_for(events.__anext__(), 10)).decode()
        lines = dict(line.split(": ", 1) for line in text.strip().split("\n"))
        found.append(f"{lines['event']} {json.loads(lines['data'])}" if "event" in lines else text)
    return found


def test_a_reader_gets_its_owners_events_and_goes_on_where_it_stopped() -> None:
    async def check() -> None:
        told = Feed()
        mine, other = told.events("me", None), told.events("you", None)
        assert await read(mine, 1) == await read(other, 1) == [": open\n\n"]
        for owner, data in (("me", 1), ("you", 2), (None, 3), ("me", 4)):
            told.publish(owner, "turn", data)
        assert await read(mine, 3) == ["turn 1", "turn 3", "turn 4"]
        assert await read(other, 2) == ["turn 2", "turn 3"]
        again = told.events("me", told.seq - 2)
        assert (await read(again, 3))[1:] == ["turn 3", "turn 4"]

    asyncio.run(check())


def test_a_reader_that_is_too_late_or_too_slow_starts_anew_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "MOST_BYTES", 200)

    async def check() -> None:
        told = Feed()
        first = told.seq
        slow = told.events("me", None)
        await read(slow, 1)
        told.publish("me", "turn", 0)
        assert await read(slow, 1) == ["turn 0"]
        for number in range(1, 10):
            told.publish("me", "turn", number)
        assert await read(slow, 1) == ["reset {}"]
        told.publish("me", "turn", 10)
        assert await read(slow, 1) == ["turn 10"]
        for after in (first, told.seq + 1):  # before what is kept; of another server
            assert (await read(told.events("me", after), 2))[1] == "reset {}"
        assert sum(len(one.text) for one in told._kept) <= 200

    asyncio.run(check())


def test_a_silent_stream_says_that_it_lives() -> None:
    async def check() -> None:
        told = Feed()
        events = told.events("me", None, 0.01)
        assert await read(events, 3) == [": open\n\n", ": ping\n\n", ": ping\n\n"]
        told.publish("me", "turn", 1)
        assert "turn 1" in await read(events, 2)

    asyncio.run(check())
