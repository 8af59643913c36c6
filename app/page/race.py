"""Race: two methods write the same reply in turn, several times, and are compared.

Nothing is drafted from the memory of earlier texts (``memory=None``): a round would find the text
of the round before in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from app.worker.backend import Backend
from app.worker.messages import ChatRequest, Done, Failed

ROUNDS = 3


@dataclass(frozen=True)
class Run:
    """A reply by one of the methods.

    tokens  for each token: seconds since the first, its text, and whether it was drafted
    """

    method: str
    round: int
    tokens: tuple[tuple[float, str, bool], ...]
    done: Done


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
    same      whether the texts are the same
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
    raise NotImplementedError
    yield
