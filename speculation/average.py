"""Average: a moving average of what is measured again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batching.clock import now


class Average:
    """A moving average. The first value counts fully, unless there was one to begin with.

    rate   share of a new value
    value  the average; 0 while there is none
    """

    __slots__ = ("_has_value", "rate", "value")

    def __init__(self, rate: float, value: float | None = None) -> None:
        self.rate, self.value = rate, value or 0.0
        self._has_value = value is not None

    def add(self, value: float, n: int = 1) -> None:
        """Learn ``value``, which was measured ``n`` times."""
        share = 1.0 - (1.0 - self.rate) ** n if self._has_value else 1.0
        self.value += share * (value - self.value)
        self._has_value = True

    @contextmanager
    def timing(self, n: int) -> Iterator[None]:
        """Learn the seconds of each of ``n`` things that are done inside together."""
        start = now()
        yield
        self.add((now() - start) / n, n)
