"""The check that all parameters share: numbers within their range."""

from __future__ import annotations

from typing import Any

from batching.errors import InvalidParameter


def check_ranges(params: Any, ranges: tuple[tuple[str, float, float], ...]) -> None:
    """Refuse a field of ``params`` outside its range, given as ``(name, lowest, highest)``.

    Raises InvalidParameter with the name, the value and the range.
    """
    for name, low, high in ranges:
        value = getattr(params, name)
        if isinstance(getattr(type(params), name, None), int) and value != int(value):
            raise InvalidParameter(f"{name} is {value}; give a whole number")
        if not low <= value <= high:
            raise InvalidParameter(f"{name} is {value}; give {low} to {high}")
