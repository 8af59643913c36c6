"""Race: two methods write the same reply in turn, several times, and are compared.

The first round is shown while it is written; the rounds after it make the number more certain.

Nothing is drafted from the memory of earlier texts (``memory=None``): in it, each round would find
the text of the round before. So a reply to a prompt that was asked before may be slower here than
in the chat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median_low
from time import monotonic
from typing import Any, NamedTuple

from app.api.log import current_call
from app.page.feed import Feed
from app.page.outcome import speed, times
from app.worker.backend import Backend
from app.worker.messages import ChatRequest, Done, Event, Failed, Tokens
from batching.cache import common_prefix
from speculation.drafter import BASELINE

ROUNDS = 3
INTERVAL = 0.1  # seconds between two tellings of the progress
SAME = "Same text ✓"
N_TOP = 50  # likeliest tokens, among which are those at which two texts part
NEAR_TIE = 0.01  # as docs/glossary.md has it
MOST_GAP = 2.0  # that rounding may close: several rows changed a logit by 1.02 (docs/lossless.md)
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

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self.tokens[-1][0] if self.tokens else 0.0


def race(
    backend: Backend,
    request: ChatRequest,
    methods: tuple[str, str],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = monotonic,
    hear: Callable[[Event], object] = lambda event: None,
) -> Iterator[Json]:
    """Let two methods write the reply to ``request`` in turn. Yields what is told of it:

    progress  the present run's ``round``, counted from 0 to ``n_rounds - 1``, its ``method``, the
              number of its tokens so far, and about how many seconds of the round are ``left``,
              None before there are two tokens. In the first round also the run's ``lane``, 0 or 1,
              and its new ``tokens``: each one's text, and whether it was drafted
    result    after each round: ``sentence``, how many times as fast the second method is as the
              first, that is the median of the rounds so far, and its range, or that the runs were
              too short; ``texts``, whether they are the same in every round, or where and why two
              part; ``played``, a run of each method, of the round with the median, to play on one
              clock
    error     at the end, if a run failed

    Leaving the loop early stops the run. ``hear`` gets all events of the runs.
    """
    request = replace(request, memory=None, record=False)
    titles = {one.name: one.title for one in backend.methods()} | {BASELINE: "plain decoding"}
    before, after = (titles[method.partition(":")[0]] for method in methods)
    pairs: list[tuple[Run, Run]] = []
    texts = SAME
    for number in range(rounds):
        latest = dict(enumerate(pairs[-1])) if pairs else {}
        # Each begins in turn: the machine may get slower or quicker meanwhile.
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            now = {"round": number, "n_rounds": rounds, "method": methods[i], "lane": i}
            asked = replace(request, method=methods[i])
            run = yield from _run(backend, asked, now, latest, clock, hear)
            if run is None:
                return
            latest[i] = run
        pairs.append((latest[0], latest[1]))
        if texts == SAME and latest[0].text != latest[1].text:
            at = f" of round {number + 1}" if rounds > 1 else ""
            texts = _parting(backend, request, latest[0], latest[1], at)
        speed_ups = [_speed_up(pair) for pair in pairs]
        middle = median_low(speed_ups)
        sentence = f"{after[0].upper()}{after[1:]} is {times(middle)} as fast as {before}"
        if len(pairs) > 1:
            slowest, fastest = times(min(speed_ups)), times(max(speed_ups))
            sentence += f" ({slowest} to {fastest} in {len(pairs)} rounds)"
        if any(map(_is_short, zip(*pairs, strict=True))):
            sentence = "Too short for a number"
        played = [
            {"method": run.method, "tokens": [[round(at, 3), *token] for at, *token in run.tokens]}
            for run in pairs[speed_ups.index(middle)]
        ]
        yield {"result": {"sentence": sentence, "texts": texts, "played": played}}


def _run(
    backend: Backend,
    request: ChatRequest,
    now: Json,
    latest: Mapping[int, Run],
    clock: Callable[[], float],
    hear: Callable[[Event], object],
) -> Generator[Json, None, Run | None]:
    """Write the reply once. Returns None if that failed or was stopped. ``latest`` has the last run
    of each method."""
    tokens: list[tuple[float, str, bool]] = []
    ids: list[int] = []
    first = due = 0.0
    n_told, number, lane = 0, now["round"], now["lane"]
    n_expected = max((len(run.ids) for run in latest.values()), default=request.max_tokens or 0)

    def progress(seconds: float) -> Json:
        nonlocal n_told
        new, n_told = tokens[n_told:], len(tokens)
        shown = [token for _, *token in new] if number == 0 else []
        whole = max(seconds, seconds / max(1, len(ids) - 1) * (n_expected - 1))
        other = latest[1 - lane].seconds if 1 - lane in latest else whole
        later = other if lane == number % 2 else 0.0  # of the round's second run
        left = round(whole - seconds + later, 1) if seconds else None
        return {"progress": {**now, "n_tokens": len(ids), "left": left, "tokens": shown}}

    yield progress(0.0)
    with closing(backend.reply(request)) as events:
        for event in events:
            hear(event)
            if isinstance(event, Tokens):
                at = clock()
                if not ids:
                    first, due = at, at + INTERVAL
                tokens += [(at - first, text, drafted) for text, drafted in event.pieces]
                ids += event.ids
                if at >= due:
                    due = at + INTERVAL
                    yield progress(at - first)
            elif isinstance(event, Failed):
                yield {"error": event.message}
            elif isinstance(event, Done) and event.finish_reason != "cancelled":
                if len(tokens) > n_told:
                    yield progress(tokens[-1][0])  # the rest
                return Run(request.method, tokens, ids, event)
    return None


def _speed_up(pair: tuple[Run, Run]) -> float:
    before, after = (speed(run.done) for run in pair)
    return after / before if before else 0.0


def _is_short(runs: Sequence[Run]) -> bool:
    """Whether a method wrote too little to tell its speed."""
    n = sum(run.done.n_tokens - run.done.n_first for run in runs)
    return n < LEAST_TOKENS or sum(run.done.decode_seconds for run in runs) < LEAST_SECONDS


def _parting(backend: Backend, request: ChatRequest, one: Run, other: Run, at: str = "") -> str:
    """Where two texts part and why: what plain decoding finds likely after what they share."""
    n = common_prefix(one.ids, other.ids)
    told = f"The texts part at token {n + 1}{at}"
    if "rejection" in one.method + other.method:
        return f"{told}: “rejection” keeps the distribution of texts, not the text itself."
    tokens = {*one.ids[n : n + 1], *other.ids[n : n + 1]}
    begun = tuple(one.ids[:n])
    asked = replace(request, method=BASELINE, sampling={}, begun=begun, logprobs=N_TOP)
    with closing(backend.reply(asked)) as events:
        found = next((event.chances[0][1] for event in events if isinstance(event, Tokens)), ())
    logprobs = [chance.logprob for chance in found if chance.id in tokens]
    gap = abs(logprobs[0] - logprobs[1]) if len(logprobs) == 2 else 0.0
    apart = f", {gap:.2f} apart," if gap >= NEAR_TIE else f", {gap:.1g} apart (a near-tie),"
    apart = apart if len(logprobs) == 2 else ""
    two = f"{'the two best' if tokens == {chance.id for chance in found[:2]} else 'two'} tokens"
    model, is_drawn = backend.status().model, bool(request.sampling.get("temperature"))
    if (is_exact := model is not None and model.spec.exact) or (gap > MOST_GAP and not is_drawn):
        why = "With “exact” this should not be" if is_exact else "Rounding does not explain this"
        return f"{told}, at {two}{apart[:-1]}. {why}: please report it."
    what = f"the draw between {two}{apart} went the other way"
    return (
        f"{told}: this model's kernels round several rows in another way than one, so "
        f"{what if is_drawn else f'{two}{apart} changed places'}. Load with “exact” for the very "
        "same text."
    )


class Races:
    """The running races, at most one an owner: a new one ends the one before it. Each runs in a
    thread; the stream has what ``race`` tells, then the ``end``: empty, or why there is no more."""

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
        call = current_call()
        call.writes(self._backend.status().model, owner, "race")
        asked = call.asked(request)
        loop = asyncio.get_running_loop()

        def tell(told: Json) -> None:
            data = {"race": request.id, **told}
            loop.call_soon_threadsafe(self._feed.publish, owner, "race", data)

        def run() -> None:
            end = "The race was stopped."
            try:
                for told in race(self._backend, asked, methods, rounds, hear=call.take):
                    if is_stopping.is_set():
                        break
                    if "result" in told:
                        end = ""
                    if "error" in told:
                        end = told["error"]
                    else:
                        tell(told)
            finally:
                call.close()
                tell({"end": end})
                loop.call_soon_threadsafe(self._races.pop, request.id)

        threading.Thread(target=run, daemon=True).start()
        return request.id

    def stop(self, owner: str, id_: str) -> None:
        """Stop the race, if it runs and is this owner's."""
        whose, is_stopping = self._races.get(id_, (None, None))
        if whose == owner and is_stopping is not None:
            is_stopping.set()
            self._backend.stop(id_)
