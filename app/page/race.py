"""Race: two methods write the same reply in turn, several times, and are compared.

Nothing is drafted from the memory of earlier texts (``memory=None``): in it, each round would find
the text of the round before. So a reply to a prompt that was asked before may be slower here than
in the chat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median_low
from time import monotonic
from typing import Any, NamedTuple

from app.page.feed import Feed
from app.page.outcome import speed, times
from app.worker.backend import Backend
from app.worker.messages import ChatRequest, Done, Failed, Tokens
from batching.cache import common_prefix
from speculation.drafter import BASELINE

ROUNDS = 3
INTERVAL = 0.1  # seconds between two tellings of the progress
# Of each method, in all rounds together. In half a second, a pause of 20 ms changes a speed by 4%.
LEAST_TOKENS, LEAST_SECONDS = 64, 0.5
Json = dict[str, Any]


class Run(NamedTuple):
    """A reply by one of the methods.

    tokens  for each token: seconds since the first, its text, and whether it was drafted
    ids     the tokens
    """

    method: str
    tokens: list[tuple[float, str, bool]]
    ids: list[int]
    done: Done

    @property
    def text(self) -> str:
        return "".join(text for _, text, _ in self.tokens)


def race(
    backend: Backend,
    request: ChatRequest,
    methods: tuple[str, str],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = monotonic,
) -> Iterator[Json]:
    """Let two methods write the reply to ``request`` in turn. Yields what is told of it:

    progress  the present run's ``round``, counted from 0 to ``n_rounds - 1``, its ``method``, and
              the number of its tokens so far
    error     at the end, if a run failed
    result    at the end, unless a run failed or was stopped: ``sentence``, how many times as fast
              the second method is as the first, that is the median of all rounds, and its range, or
              that the runs were too short; ``texts``, whether they are the same in every round, or
              at which token two part; ``played``, a run of each method, of the round with the
              median, to play on one clock

    Leaving the loop early stops the run.
    """
    request = replace(request, memory=None, record=False)
    pairs: list[tuple[Run, Run]] = []
    for number in range(rounds):
        pair: dict[int, Run] = {}
        # Each begins in turn: the machine may get slower or quicker meanwhile.
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            now = {"round": number, "n_rounds": rounds, "method": methods[i], "n_tokens": 0}
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
    played = [
        {"method": run.method, "tokens": [[round(at, 3), *token] for at, *token in run.tokens]}
        for run in pairs[speed_ups.index(middle)]
    ]
    yield {"result": {"sentence": sentence, "texts": _texts(pairs), "played": played}}


def _run(
    backend: Backend, request: ChatRequest, now: Json, clock: Callable[[], float]
) -> Generator[Json, None, Run | None]:
    """Write the reply once. Returns None if that failed or was stopped."""
    tokens: list[tuple[float, str, bool]] = []
    ids: list[int] = []
    first = due = 0.0
    yield {"progress": now}
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
                    yield {"progress": {**now, "n_tokens": len(ids)}}
            elif isinstance(event, Failed):
                yield {"error": event.message}
            elif isinstance(event, Done) and event.finish_reason != "cancelled":
                return Run(request.method, tokens, ids, event)
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


class Races:
    """The running races, at most one an owner: a new one ends the one before it. Each runs in a
    thread, and the stream tells how far it is."""

    def __init__(self, backend: Backend, feed: Feed) -> None:
        self._backend = backend
        self._feed = feed
        self._races: dict[str, tuple[str, threading.Event]] = {}  # with the owner, by the request

    def start(self, owner: str, request: ChatRequest, methods: tuple[str, str], rounds: int) -> str:
        """Start a race of two methods; returns its id."""
        for other in list(self._races):
            self.stop(owner, other)
        is_stopping = threading.Event()
        self._races[request.id] = owner, is_stopping
        loop = asyncio.get_running_loop()

        def tell(told: Json) -> None:
            data = {"race": request.id, **told}
            loop.call_soon_threadsafe(self._feed.publish, owner, "race", data)

        def run() -> None:
            end = {"error": "The race was stopped."}
            try:
                for told in race(self._backend, request, methods, rounds):
                    if is_stopping.is_set():
                        break
                    if "progress" in told:
                        tell(told)
                    else:
                        end = told
            finally:
                tell(end)
                loop.call_soon_threadsafe(self._races.pop, request.id)

        threading.Thread(target=run, daemon=True).start()
        return request.id

    def stop(self, owner: str, id_: str) -> None:
        """Stop the race, if it runs and is this owner's."""
        whose, is_stopping = self._races.get(id_, (None, None))
        if whose == owner and is_stopping is not None:
            is_stopping.set()
            self._backend.stop(id_)
