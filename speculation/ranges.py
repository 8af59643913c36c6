"""Range checks for parameter dataclasses."""

from __future__ import annotations

from typing import Any

from batching.errors import InvalidParameter


def check_ranges(params: Any, ranges: tuple[tuple[str, float, float], ...]) -> None:
    """Check fields of ``params`` against ranges ``(name, lowest, highest)``.

    Raises InvalidParameter with the name, the value and the range. A field whose default is an
    integer must have an integer value.
    """
    for name, low, high in ranges:
        value = getattr(params, name)
        if isinstance(getattr(type(params), name, None), int) and value != int(value):
            raise InvalidParameter(f"{name} is {value}; give an integer")
        if not low <= value <= high:
            raise InvalidParameter(f"{name} is {value}; give {low} to {high}")
