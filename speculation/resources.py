"""Resources: what an engine offers its methods beyond the text, kept while the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from speculation.cost import CostModel

T = TypeVar("T")


class Resources:
    """The cost of a decode, and what methods have learnt.

    Drafters live for one text. What is to outlive it (probabilities counted, tables filled) is
    kept here, in memory only.
    """

    def __init__(self, measure_cost: Callable[[], CostModel] | None = None) -> None:
        """``measure_cost`` is called once, when a method first asks what a decode costs."""
        self._measure_cost = measure_cost
        self._cost: CostModel | None = None
        self._kept: dict[Any, Any] = {}

    @property
    def cost(self) -> CostModel:
        """What a batch of n rows costs here. The first use measures it, in about a second."""
        if self._cost is None:
            if self._measure_cost is None:
                raise RuntimeError("these resources were made without a way to measure cost")
            self._cost = self._measure_cost()
        return self._cost

    @property
    def known_cost(self) -> CostModel | None:
        """The cost if it was asked for before."""
        return self._cost

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What is kept under ``key``, made when it is asked for first."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found
