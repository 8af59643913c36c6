"""The settings of a reply: read from JSON and checked before the reply starts."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field, StrictBool, TypeAdapter, ValidationError

from app.api.errors import ApiError
from app.worker.backend import MethodInfo
from batching.errors import SpeculationError
from speculation.drafter import BASELINE
from speculation.methods import METHODS, parse_method
from speculation.sampling import SamplingParams
from speculation.settings import DEFAULT_METHOD

RANDOM = -1  # as a seed: a new one for each reply
AGAIN = 0.7  # the temperature of another reply where each would be the same
FREER = 0.3  # more or less temperature
DEEPEST = 20  # levels of settings in settings
How = Literal["again", "plain", "freer", "stricter"]  # to reply another time
_NAMES = {one.name for one in fields(SamplingParams)} - {"logit_bias", "dry_breakers", "strict"}


@dataclass(frozen=True)
class Settings:
    """The user's settings for a reply.

    parameters  of the method; read, they are a part of it, as on the command line
    max_tokens  0: until the model ends or the context is full
    thinking    whether to reason first, if the model supports it; None: the model's default
    leave_out   leave out the oldest turns if the context is too small for all
    tools       the servers whose tools the model may call, each with the tools that it may not
    """

    method: str = DEFAULT_METHOD
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    system: str = ""
    thinking: StrictBool | None = None
    leave_out: StrictBool = True
    tools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_SETTINGS, _SAMPLING = TypeAdapter(Settings), TypeAdapter(SamplingParams)


def read_settings(
    values: Mapping[str, Any],
    methods: Collection[MethodInfo],
    usual: Mapping[str, float] = MappingProxyType({}),
) -> Settings:
    """The settings that JSON means. Missing and empty values keep their defaults, which are
    ``usual`` in the sampling, and those with other names may be the page's own. Raises ApiError
    whose ``param`` is a setting's name."""
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        parts = [one.values() if isinstance(one, Mapping) else one for one in level]
        level = [one for part in parts for one in part if isinstance(one, Mapping | list)]
    if level:
        raise _invalid("settings", f"are nested more than {DEEPEST} levels deep")
    try:
        found = _SETTINGS.validate_python(_given(values))
    except ValidationError as error:
        _refuse(error)
    sampling = _sampling({**usual, **_given(found.sampling)})
    return replace(found, method=_method(found, methods), sampling=sampling)


def varied(values: Mapping[str, Any], how: How, now: Settings) -> Mapping[str, Any]:
    """The settings for another reply, which is another text unless a fixed seed or temperature
    says otherwise. ``now`` is what the values mean."""
    if how == "plain":
        return {**values, "method": BASELINE, "parameters": {}}
    heat = now.sampling.get("temperature")
    if how == "freer":
        heat = min(heat + FREER, 100.0) if heat else AGAIN
    elif how == "stricter":
        heat = max(0.0, (heat or 0.0) - FREER)
    elif heat is None:
        heat = AGAIN
    return {**values, "sampling": {**(values.get("sampling") or {}), "temperature": heat}}


def _invalid(name: str, message: str) -> ApiError:
    return ApiError(f"{name}: {message}", param=name)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not empty."""
    return {
        name: value
        for name, value in values.items()
        if value is not None and (not isinstance(value, str) or value.strip())
    }


def _refuse(error: ValidationError, prefix: str = "") -> NoReturn:
    first = error.errors(include_url=False)[0]
    name, message = first["loc"][:1], f"is {first['input']!r:.40}: {first['msg']}"
    if first["type"] == "value_error":  # of SamplingParams
        name, message = first["ctx"]["error"].settings[:1], str(first["ctx"]["error"])
    raise _invalid((prefix + str(*name)).rstrip("."), message) from error


def _method(found: Settings, methods: Collection[MethodInfo]) -> str:
    """The method with its parameters."""
    name, _, rest = found.method.partition(":")
    info = next((info for info in methods if info.name == name), None)
    if info is None:
        known = ", ".join(info.name for info in methods)
        raise _invalid("method", f"is {name!r:.40}; give one of {known}")
    usual = {one.name: one.default for one in info.parameters}
    changed = [rest] if rest else []
    for parameter, value in _given(found.parameters).items():
        if parameter not in usual:
            known = ", ".join(usual) or "none"
            raise _invalid(f"parameters.{parameter}", f"{name} has {known}")
        if value != usual[parameter]:
            shown = ("off", "on")[value] if isinstance(value, bool) else value
            changed.append(f"{parameter}={shown}")
    method = f"{name}:{','.join(changed)}" if changed else name
    if name in METHODS:
        try:
            parse_method(method)
        except SpeculationError as error:
            raise _invalid("method", str(error)) from error
    return method


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    given = _given(values)
    for name in given.keys() - _NAMES:
        raise _invalid(f"sampling.{name}", "is not one of the sampling settings")
    if given.get("seed", RANDOM) == RANDOM:
        # Greedy decoding ignores the seed, so a fixed one lets equal requests compare equal.
        given["seed"] = random.randrange(2**32 - 1) if given.get("temperature") else 0
    try:
        found = _SAMPLING.validate_python(given)
    except ValidationError as error:
        _refuse(error, "sampling.")
    return {name: getattr(found, name) for name in given}
