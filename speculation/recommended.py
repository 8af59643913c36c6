"""The sampling that a model's authors recommend."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from batching.errors import InvalidParameter
from speculation.registry import RegistryError, read_registry
from speculation.sampling import SamplingParams

# Fields of ``SamplingParams`` that a GGUF calls otherwise, in ``general.sampling.NAME``.
_KEYS = {"temperature": "temp", "repeat_penalty": "penalty_repeat"}
_KINDS: dict[str, type[int] | type[float]] = {
    one.name: type(one.default)
    for one in fields(SamplingParams)
    if isinstance(one.default, int | float) and one.name not in ("seed", "strict")
}


def recommended(model: str, metadata: Callable[[str], str | None]) -> dict[str, float]:
    """Fields of ``SamplingParams`` for a model by its name or path: what its file has, else its
    line in models.txt, else a line of its family; empty if nobody recommends any.

    ``metadata`` gives a value of the file by its key.
    """
    keys = {name: f"general.sampling.{_KEYS.get(name, name)}" for name in _KINDS}
    own = {name: value for name, key in keys.items() if (value := metadata(key))}
    return _checked(own) or _checked(_listed(model))


def _checked(values: Mapping[str, str]) -> dict[str, float]:
    """The values as numbers; empty if one of them cannot be used."""
    try:
        found = {name: _KINDS[name](float(value)) for name, value in values.items()}
        SamplingParams(**found)  # type: ignore[arg-type]
    except (KeyError, ValueError, OverflowError, InvalidParameter):
        return {}
    return found


def _listed(model: str) -> Mapping[str, str]:
    """What models.txt has. The first word of a model's name is its family: "qwen2.5"."""
    try:
        entries = read_registry()
    except RegistryError:
        return {}
    name = Path(model).name.lower()
    if model in entries and entries[model].sampling:
        return entries[model].sampling
    for entry in entries.values():
        family = re.escape(entry.name.partition("-")[0])
        if entry.sampling and re.search(rf"(?<![a-z0-9]){family}(?![a-z0-9.])", name):
            return entry.sampling
    return {}
