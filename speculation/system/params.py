"""Parameters: the fields of frozen dataclasses, each with its help and its range."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from batching.errors import check_ranges


def param(default: Any, text: str, within: tuple[float, float] | None = None) -> Any:
    """A field with its default, its help and, of a number, its lowest and highest value."""
    return field(default=default, metadata={"help": text, "within": within})


@dataclass(frozen=True)
class Params:
    """Parameters whose fields are ``param``.

    Raises InvalidParameter for a value of another type, or out of its range.
    """

    def __post_init__(self) -> None:
        ranges = [(one.name, one.metadata.get("within")) for one in fields(self)]
        check_ranges(self, tuple((name, *within) for name, within in ranges if within))
