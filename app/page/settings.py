"""The settings of a reply: read from JSON and checked before the reply starts."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from app.worker.backend import MethodInfo, Parameter
from batching.errors import SpeculationError
from speculation.methods import METHODS, parse_method
from speculation.sampling import SamplingParams
from speculation.settings import DEFAULT_METHOD

MAX_TOKENS = 1024
RANDOM = -1  # as a seed: a new one for each reply
N_SEEDS = 2**32 - 1
DEEPEST = 20  # levels of settings in settings
_TEXTS = ("grammar", "regex", "json_schema")
_DEFAULTS = {
    one.name: "" if one.name in _TEXTS else one.default
    for one in fields(SamplingParams)
    if one.name in _TEXTS or (isinstance(one.default, int | float) and one.name != "strict")
}


class InvalidSetting(Exception):
    """A setting that no reply can be made with. ``name`` is its name, as in the JSON."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True)
class Settings:
    """The user's settings for a reply.

    method      with its parameters as on the command line
    max_tokens  None: until the context is full
    thinking    whether to reason first, if the model supports it; None: the model's default
    leave_out   leave out the oldest turns if the context is too small for all
    """

    method: str = DEFAULT_METHOD
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = MAX_TOKENS
    system: str = ""
    thinking: bool | None = None
    leave_out: bool = True


def read_settings(values: Mapping[str, Any], methods: Collection[MethodInfo]) -> Settings:
    """The settings that JSON means: the fields of ``Settings``, and ``parameters`` of the method.

    Missing and empty values keep their defaults, and so do those with other names, which may be the
    page's own. 0 for ``max_tokens`` means until the context is full. Raises InvalidSetting.
    """
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        parts = [one.values() if isinstance(one, Mapping) else one for one in level]
        level = [one for part in parts for one in part if isinstance(one, Mapping | list)]
    if level:
        raise InvalidSetting("settings", f"are nested more than {DEEPEST} levels deep")
    max_tokens = _checked("max_tokens", values.get("max_tokens"), MAX_TOKENS)
    if max_tokens < 0:
        raise InvalidSetting("max_tokens", f"is {max_tokens}; give 0 or more")
    thinking = values.get("thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise InvalidSetting("thinking", f"is {thinking!r:.40}; give true, false or null")
    return Settings(
        _method(values, methods),
        _sampling(_mapping(values, "sampling")),
        max_tokens or None,
        _checked("system", values.get("system"), ""),
        thinking,
        _checked("leave_out", values.get("leave_out"), True),
    )


def _method(values: Mapping[str, Any], methods: Collection[MethodInfo]) -> str:
    given = _checked("method", values.get("method"), DEFAULT_METHOD)
    name, _, rest = given.partition(":")
    info = next((info for info in methods if info.name == name), None)
    if info is None:
        known = ", ".join(info.name for info in methods)
        raise InvalidSetting("method", f"is {name!r:.40}; give one of {known}")
    known_parameters = {one.name: one for one in info.parameters}
    changed = [rest] if rest else []
    for parameter, value in _mapping(values, "parameters").items():
        where = f"parameters.{parameter}"
        if parameter not in known_parameters:
            raise InvalidSetting(where, f"{name} has {', '.join(known_parameters) or 'none'}")
        changed += _changed(known_parameters[parameter], where, value)
    method = f"{name}:{','.join(changed)}" if changed else name
    if name in METHODS:
        try:
            parse_method(method)
        except SpeculationError as error:
            raise InvalidSetting("method", str(error)) from error
    return method


def _changed(parameter: Parameter, where: str, value: Any) -> list[str]:
    value = _checked(where, value, parameter.default)
    if value == parameter.default:
        return []
    shown = ("off", "on")[value] if isinstance(value, bool) else value
    return [f"{parameter.name}={shown}"]


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if name not in _DEFAULTS:
            raise InvalidSetting(f"sampling.{name}", "is not one of the sampling settings")
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        found[name] = _checked(f"sampling.{name}", value, _DEFAULTS[name])
    if found.get("seed", RANDOM) == RANDOM:
        # Greedy decoding ignores the seed, so a fixed one lets equal requests compare equal.
        found["seed"] = random.randrange(N_SEEDS) if found.get("temperature") else 0
    for name, value in found.items():
        _check(f"sampling.{name}", {name: value})
    _check("sampling", found)  # some exclude each other
    return found


def _check(name: str, sampling: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**sampling)
    except SpeculationError as error:
        raise InvalidSetting(name, str(error)) from error


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidSetting(name, f"is {value!r:.40}; give an object")
    return value or {}


def _checked(name: str, value: Any, default: Any) -> Any:
    """The value, of the default's type; the default if there is none."""
    if value is None or (value == "" and not isinstance(default, str)):
        return default
    if isinstance(default, bool) or isinstance(value, bool):
        fits, wanted = isinstance(default, bool) and isinstance(value, bool), "true or false"
        wanted = wanted if isinstance(default, bool) else "a number"
    elif isinstance(default, str):
        fits, wanted = isinstance(value, str), "a text"
    else:
        fits = isinstance(value, int | float) and math.isfinite(value)
        wanted = "a whole number" if isinstance(default, int) else "a number"
        if isinstance(default, int):
            fits = fits and value == int(value)
    if not fits:
        raise InvalidSetting(name, f"is {value!r:.40}; give {wanted}")
    return int(value) if isinstance(default, int) and not isinstance(default, bool) else value
