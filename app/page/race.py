"""Race: two methods write the same reply in turn, several times, and are compared.

Nothing is drafted from the memory of earlier texts (``memory=None``): in it, each round would find
the text of the round before. So a reply to a prompt that was asked before may be slower here than
in the chat.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from statistics import median_low
from time import monotonic
from typing import Any

from app.page.feed import Feed
from app.page.outcome import speed, times
from app.worker.backend import Backend
from app.worker.messages import ChatRequest, Done, Failed, Tokens
from batching.cache import common_prefix
from speculation.drafter import BASELINE

ROUNDS = 3
INTERVAL = 0.1  # seconds between two Running
# Of each method, in all rounds together. In half a second, a pause of 20 ms changes a speed by 4%.
LEAST_TOKENS, LEAST_SECONDS = 64, 0.5


@dataclass(frozen=True)
class Run:
    """A reply by one of the methods.

    tokens  for each token: seconds since the first, its text, and whether it was drafted
    ids     the tokens
    """

    method: str
    tokens: tuple[tuple[float, str, bool], ...]
    ids: tuple[int, ...]
    done: Done

    @property
    def text(self) -> str:
        return "".join(text for _, text, _ in self.tokens)

    def as_json(self) -> dict[str, Any]:
        tokens = [[round(seconds, 3), text, drafted] for seconds, text, drafted in self.tokens]
        return {"method": self.method, "tokens": tokens}


@dataclass(frozen=True)
class Running:
    """How far the present run is. ``round`` counts from 0 to ``n_rounds - 1``."""

    round: int
    n_rounds: int
    method: str
    n_tokens: int


@dataclass(frozen=True)
class Result:
    """The end of a race.

    sentence  how many times as fast the second method is as the first: the median of all rounds,
              and its range; or that the runs were too short
    texts     whether the texts are the same in every round, or at which token two part
    played    a run of each method, of the round with the median, to play on one clock
    """

    sentence: str
    texts: str
    played: tuple[Run, Run]


def race(
    backend: Backend,
    request: ChatRequest,
    methods: tuple[str, str],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = monotonic,
) -> Iterator[Running | Result | Failed]:
    """Let two methods write the reply to ``request`` in turn. Yields Running, then Result or
    Failed. Ends without a result if a run is stopped.

    Leaving the loop early stops the run.
    """
    request = replace(request, memory=None, record=False)
    pairs: list[tuple[Run, Run]] = []
    for number in range(rounds):
        pair: dict[int, Run] = {}
        # Each begins in turn: the machine may get slower or quicker meanwhile.
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            now = Running(number, rounds, methods[i], 0)
            run = yield from _run(backend, replace(request, method=methods[i]), now, clock)
            if run is None:
                return
            pair[i] = run
        pairs.append((pair[0], pair[1]))
    speed_ups = [_speed_up(pair) for pair in pairs]
    middle = median_low(speed_ups)
    titles = {one.name: one.title for one in backend.methods()} | {BASELINE: "plain decoding"}
    before, after = (titles[method.partition(":")[0]] for method in methods)
    sentence = f"{after[0].upper()}{after[1:]} is {times(middle)} as fast as {before}"
    if rounds > 1:
        slowest, fastest = times(min(speed_ups)), times(max(speed_ups))
        sentence += f" ({slowest} to {fastest} in {rounds} rounds)"
    if any(map(_is_short, zip(*pairs, strict=True))):
        sentence = "Too short for a number"
    yield Result(sentence, _texts(pairs), pairs[speed_ups.index(middle)])


def _run(
    backend: Backend, request: ChatRequest, now: Running, clock: Callable[[], float]
) -> Generator[Running | Failed, None, Run | None]:
    """Write the reply once. Returns None if that failed or was stopped."""
    tokens: list[tuple[float, str, bool]] = []
    ids: list[int] = []
    first = due = 0.0
    yield now
    with closing(backend.reply(request)) as events:
        for event in events:
            if isinstance(event, Tokens):
                at = clock()
                if not ids:
                    first, due = at, at + INTERVAL
                tokens += [(at - first, text, drafted) for text, drafted in event.pieces]
                ids += event.ids
                if at >= due:
                    due = at + INTERVAL
                    yield replace(now, n_tokens=len(ids))
            elif isinstance(event, Failed):
                yield event
            elif isinstance(event, Done) and event.finish_reason != "cancelled":
                return Run(request.method, tuple(tokens), tuple(ids), event)
    return None


def _speed_up(pair: tuple[Run, Run]) -> float:
    before, after = (speed(run.done) for run in pair)
    return after / before if before else 0.0


def _is_short(runs: Sequence[Run]) -> bool:
    """Whether a method wrote too little to tell its speed."""
    n = sum(run.done.n_tokens - run.done.n_first for run in runs)
    return n < LEAST_TOKENS or sum(run.done.decode_seconds for run in runs) < LEAST_SECONDS


def _texts(pairs: Sequence[tuple[Run, Run]]) -> str:
    for one, other in pairs:
        if one.text != other.text:
            return f"The texts part at token {common_prefix(one.ids, other.ids) + 1}"
    return "Same text ✓"


@dataclass
class _Race:
    owner: str
    request: ChatRequest
    is_stopping: threading.Event = field(default_factory=threading.Event)


class Races:
    """The running races, at most one an owner: a new one ends the one before it. Each runs in a
    thread, and the stream tells how far it is."""

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
        loop = asyncio.get_running_loop()

        def tell(**data: Any) -> None:
            loop.call_soon_threadsafe(self._feed.publish, owner, "race", {"race": id_, **data})

        def run() -> None:
            end: dict[str, Any] = {"error": "The race was stopped."}
            try:
                for event in race(self._backend, request, methods, rounds):
                    if started.is_stopping.is_set():
                        break
                    if isinstance(event, Running):
                        tell(progress=asdict(event))
                    elif isinstance(event, Result):
                        played = [one.as_json() for one in event.played]
                        end = {"result": {**vars(event), "played": played}}
                    else:
                        end = {"error": event.message}
            finally:
                tell(**end)
                loop.call_soon_threadsafe(self._races.pop, id_)

        threading.Thread(target=run, daemon=True).start()
        return id_

    def stop(self, owner: str, id_: str) -> None:
        found = self._races.get(id_)
        if found is not None and found.owner == owner:
            found.is_stopping.set()
            self._backend.stop(found.request.id)
