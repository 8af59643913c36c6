"""Work of several texts, done together: a draft model's decode, a head's forward pass. Pure.

What drafts a tree level by level is a coroutine: it yields the ``Work`` of a level and is resumed
with its result. For one text, ``run`` does each piece as it comes. For several, ``Running`` and
``advance`` collect the pieces of all texts and do those of one kind in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from batching.clock import now

T = TypeVar("T")


class Work(NamedTuple):
    """A piece of work that can be done together with others of its kind.

    together  does several pieces: takes their parts and returns as many results, valid until its
              next call
    part      what is to be done for this text
    kind      pieces with the same ``together`` but another kind are not done in one call
    """

    together: Callable[[Sequence[Any]], Sequence[Any]]
    part: Any
    kind: Hashable = None


# Yields work, is resumed with each result, and returns a value.
Coroutine = Generator[Work, Any, T]


def run(coroutine: Coroutine[T]) -> T:
    """Run a coroutine by itself."""
    try:
        work = next(coroutine)
        while True:
            work = _resume(coroutine, work)
    except StopIteration as end:
        result: T = end.value
    return result


def _resume(coroutine: Coroutine[Any], work: Work) -> Work:
    """Do ``work`` and resume the coroutine with its result; returns its next work."""
    try:
        result = work.together([work.part])[0]
    except Exception as error:
        return coroutine.throw(error)
    return coroutine.send(result)


class _Clock(threading.local):
    """Seconds in which a text's coroutine runs, or shares in the work; not those of others'."""

    start = 0.0

    def now(self) -> float:
        return now() - self.start


own_time = _Clock()


class Running:
    """A coroutine on its way.

    work    what it waits for; None when it has ended
    kind    that of work that can be done with it
    error   what it raised
    """

    def __init__(self, coroutine: Coroutine[Any]) -> None:
        self._coroutine = coroutine
        self.work: Work | None = None
        self.kind: Hashable = None
        self.error: BaseException | None = None
        self._seconds = 0.0  # of its own
        self._resume(lambda: next(coroutine))

    def _resume(self, resume: Callable[[], Work], share: float = 0.0) -> None:
        """Let it run to its next work. ``share`` is what its last took, in seconds."""
        own_time.start = now() - self._seconds - share
        try:
            work = resume()
            self.kind = work.together, work.kind
            hash(self.kind)  # fails here if that is no work, not where it meets others
            self.work = work
        except StopIteration:
            self.work = None
        except BaseException as error:
            self.work, self.error = None, error
        finally:
            self._seconds = own_time.now()
            own_time.start = 0.0

    def send(self, result: Any, share: float) -> None:
        self._resume(lambda: self._coroutine.send(result), share)

    def throw(self, error: Exception) -> None:
        self._resume(lambda: self._coroutine.throw(error))

    def close(self) -> None:
        """Give it up."""
        self.work = None
        self._coroutine.close()


def advance(running: Sequence[Running]) -> None:
    """Do the next work of all that are still running, and resume them with the results.

    What fails together is done one by one: the work of one must not end that of the others.
    """
    kinds: dict[Hashable, list[Running]] = {}
    for one in running:
        if one.work is not None:
            kinds.setdefault(one.kind, []).append(one)
    for ones in kinds.values():
        works = [one.work for one in ones if one.work is not None]
        start = now()
        try:
            results = works[0].together([work.part for work in works])
            pairs = [*zip(ones, results, strict=True)]
        except Exception as error:
            if len(ones) == 1:
                ones[0].throw(error)
            else:
                for one in ones:
                    advance([one])
        else:
            share = (now() - start) / len(ones)
            for one, result in pairs:
                one.send(result, share)


def done(value: T) -> Coroutine[T]:
    """A coroutine that has its result already."""
    return value
    yield
