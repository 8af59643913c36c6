"""Races as jobs of the server: each runs in a thread, and the stream tells how far it is."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from app.page.feed import Feed
from app.page.outcome import speed
from app.page.race import Result, Run, Running, race
from app.worker.backend import Backend
from app.worker.messages import ChatRequest, Failed


@dataclass
class _Race:
    owner: str
    request: ChatRequest
    is_stopping: threading.Event = field(default_factory=threading.Event)


class Races:
    """The running races, at most one an owner: a new one ends the one before it."""

    def __init__(self, backend: Backend, feed: Feed) -> None:
        self._backend = backend
        self._feed = feed
        self._races: dict[str, _Race] = {}  # by id

    def start(self, owner: str, request: ChatRequest, methods: tuple[str, str], rounds: int) -> str:
        """Start a race of two methods; returns its id."""
        for number, other in list(self._races.items()):
            if other.owner == owner:
                self.stop(owner, number)
        id_ = secrets.token_urlsafe(9)
        started = self._races[id_] = _Race(owner, request)
        # Not one of the loop's own few threads, which the store needs.
        arguments = asyncio.get_running_loop(), id_, started, methods, rounds
        threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return id_

    def stop(self, owner: str, id_: str) -> None:
        found = self._races.get(id_)
        if found is not None and found.owner == owner:
            found.is_stopping.set()
            self._backend.stop(found.request.id)

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        id_: str,
        started: _Race,
        methods: tuple[str, str],
        rounds: int,
    ) -> None:
        def tell(**data: Any) -> None:
            loop.call_soon_threadsafe(
                self._feed.publish, started.owner, "race", {"race": id_, **data}
            )

        has_ended = False
        try:
            for event in race(self._backend, started.request, methods, rounds):
                if started.is_stopping.is_set():
                    break
                if isinstance(event, Running):
                    tell(progress=asdict(event))
                elif isinstance(event, Result):
                    tell(result={**vars(event), "played": [_played(run) for run in event.played]})
                    has_ended = True
                elif isinstance(event, Failed):
                    tell(error=event.message)
                    has_ended = True
        finally:
            if not has_ended:
                tell(error="The race was stopped.")
            loop.call_soon_threadsafe(self._races.pop, id_)


def _played(run: Run) -> Mapping[str, Any]:
    return {
        "method": run.method,
        "tokens": [[round(seconds, 3), text, drafted] for seconds, text, drafted in run.tokens],
        "tokens_per_second": round(speed(run.done), 1),
    }
