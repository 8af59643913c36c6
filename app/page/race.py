"""Race: two methods write the same reply in turn, several times, and are compared.

Nothing is drafted from the memory of earlier texts (``memory=None``): in it, each round would find
the text of the round before. So a reply to a prompt that was asked before may be slower here than
in the chat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median_low
from time import monotonic

from app.page.outcome import LEAST_COMPARED, LEAST_SECONDS, speed, times
from app.worker.backend import Backend
from app.worker.messages import Chance, ChatRequest, Done, Failed, Tokens
from batching.cache import common_prefix
from speculation.drafter import BASELINE

ROUNDS = 3
INTERVAL = 0.1  # seconds between two Running
# Logarithms of probabilities. Rounding moved those of the bundled models by less.
NEAR_TIE = 0.5


@dataclass(frozen=True)
class Run:
    """A reply by one of the methods.

    tokens  for each token: seconds since the first, its text, and whether it was drafted
    ids     the tokens
    """

    method: str
    round: int
    tokens: tuple[tuple[float, str, bool], ...]
    ids: tuple[int, ...]
    done: Done

    @property
    def text(self) -> str:
        return "".join(text for _, text, _ in self.tokens)


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

    speed_up  how many times as fast the second method is as the first: the median of all rounds;
              0 if the runs were too short for a number
    slowest, fastest  the lowest and the highest of any round
    sentence  speed-up and range, or that the runs were too short
    same      whether the texts are the same in every round
    parting   ``same text``, or at which token and character they part, and why if that is known
    played    a run of each method, of the round with the median, to play on one clock
    """

    speed_up: float
    slowest: float
    fastest: float
    sentence: str
    same: bool
    parting: str
    played: tuple[Run, Run]


def race(
    backend: Backend,
    request: ChatRequest,
    methods: tuple[str, str],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = monotonic,
) -> Iterator[Running | Run | Result | Failed]:
    """Let two methods write the reply to ``request`` in turn. Yields Running and each Run, then
    Result, or Failed. Ends without a result if a run is stopped.

    Leaving the loop early stops the run.
    """
    request = replace(request, memory=None, record=False)
    pairs: list[tuple[Run, Run]] = []
    for number in range(rounds):
        pair: dict[int, Run] = {}
        # Each begins in turn: the machine may get slower or quicker meanwhile.
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            asked = replace(request, method=methods[i])
            run = yield from _run(backend, asked, number, rounds, clock)
            if run is None:
                return
            yield run
            pair[i] = run
        pairs.append((pair[0], pair[1]))
    speed_ups = [_speed_up(pair) for pair in pairs]
    middle = median_low(speed_ups)
    played = pairs[speed_ups.index(middle)]
    different = [pair for pair in (played, *pairs) if pair[0].text != pair[1].text]
    parting = _parting(backend, request, different[0]) if different else "same text"
    slowest, fastest = min(speed_ups), max(speed_ups)
    titles = {one.name: one.title for one in backend.methods()} | {BASELINE: "plain decoding"}
    before, after = (titles[method.partition(":")[0]] for method in methods)
    sentence = f"{after[0].upper()}{after[1:]} is {times(middle)} as fast as {before}"
    if rounds > 1:
        sentence += f" ({times(slowest)} to {times(fastest)} in {rounds} rounds)"
    if _is_short(pairs):
        middle = slowest = fastest = 0.0
        sentence = "Too short for a number"
    yield Result(middle, slowest, fastest, sentence, not different, parting, played)


def _run(
    backend: Backend,
    request: ChatRequest,
    number: int,
    rounds: int,
    clock: Callable[[], float],
) -> Generator[Running | Failed, None, Run | None]:
    """Write the reply once. Returns None if that failed or was stopped."""
    tokens: list[tuple[float, str, bool]] = []
    ids: list[int] = []
    first = due = 0.0
    yield Running(number, rounds, request.method, 0)
    with closing(backend.reply(request)) as events:
        for event in events:
            if isinstance(event, Tokens):
                now = clock()
                if not ids:
                    first, due = now, now + INTERVAL
                tokens += [(now - first, text, drafted) for text, drafted in event.pieces]
                ids += event.ids
                if now >= due:
                    due = now + INTERVAL
                    yield Running(number, rounds, request.method, len(ids))
            elif isinstance(event, Failed):
                yield event
            elif isinstance(event, Done) and event.finish_reason != "cancelled":
                return Run(request.method, number, tuple(tokens), tuple(ids), event)
    return None


def _speed_up(pair: tuple[Run, Run]) -> float:
    before, after = (speed(run.done) for run in pair)
    return after / before if before else 0.0


def _is_short(pairs: Sequence[tuple[Run, Run]]) -> bool:
    """Whether either method wrote too little in all rounds together."""
    for runs in zip(*pairs, strict=True):
        n = sum(run.done.n_tokens - run.done.n_first for run in runs)
        if n < LEAST_COMPARED or sum(run.done.decode_seconds for run in runs) < LEAST_SECONDS:
            return True
    return False


# Methods that draw other texts from the same seed.
_OTHER_DRAWS = {
    "verify=typical-lossy": "also accepts drafts that are only likely enough",
    "verify=rejection": "draws its tokens in another way, from the same probabilities",
}


def _parting(backend: Backend, request: ChatRequest, pair: tuple[Run, Run]) -> str:
    """Where two texts part, and why if that is known."""
    at = common_prefix(pair[0].ids, pair[1].ids)
    character = common_prefix(pair[0].text, pair[1].text)
    why = ""
    if request.sampling.get("temperature"):
        for verifier, what in _OTHER_DRAWS.items():
            for run in pair:
                if verifier in run.method:
                    why = f": {run.method} {what}"
    elif at < min(len(run.ids) for run in pair):
        why = _near_tie(backend, request, pair, at)
    return f"The texts part at token {at + 1}, character {character + 1}{why}"


def _near_tie(backend: Backend, request: ChatRequest, pair: tuple[Run, Run], at: int) -> str:
    """Whether the model finds both tokens almost equally likely where two greedy texts part; empty
    if not. Reads it from the probabilities of one more plain run."""
    asked = replace(request, method=BASELINE, max_tokens=at + 1, logprobs=2)
    ids: list[int] = []
    chances: list[tuple[Chance, tuple[Chance, ...]]] = []
    for event in backend.reply(asked):
        if isinstance(event, Tokens):
            ids += event.ids
            chances += event.chances
    if len(chances) <= at or tuple(ids[:at]) != pair[0].ids[:at]:
        return ""
    own, top = chances[at]
    found = {one.id: one.logprob for one in (own, *top)}
    logprobs = [found.get(run.ids[at], -math.inf) for run in pair]
    if not abs(logprobs[0] - logprobs[1]) < NEAR_TIE:
        return ""
    shares = " and ".join(f"{100 * math.exp(one):.0f}%" for one in logprobs)
    return (
        f": the model finds both tokens almost equally likely there ({shares}), and one row is "
        "rounded otherwise than several"
    )
