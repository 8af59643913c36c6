"""The table of methods: built-in ones, those of other packages, and those of files.

A package adds a method with an entry point in the group ``speculation.methods`` that refers to its
``MethodSpec``; ``load_method_file`` adds one from a file.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from batching.errors import InvalidParameter, require_types
from speculation.auto.drafter import auto_spec
from speculation.drafter import Method, MethodSpec
from speculation.heads.file import HeadsKind
from speculation.methods import (
    autoregressive,
    dflash,
    draft_model,
    eagle,
    jacobi,
    lookahead,
    medusa,
    mtp,
    prediction,
    prompt_lookup,
    recycling,
    redrafter,
    suffix,
)

ENTRY_POINTS = "speculation.methods"
log = logging.getLogger(__name__)


class MethodTable(Mapping[str, MethodSpec]):
    """Methods by name: the built-in ones and those of entry points, loaded on first use."""

    def __init__(self, built_in: Iterable[MethodSpec]) -> None:
        self._specs = {spec.name: spec for spec in built_in}
        self._has_searched = False

    def __getitem__(self, name: str) -> MethodSpec:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def heads_kinds(self) -> list[HeadsKind]:
        """The kinds of heads that the methods draft with."""
        return [kind for spec in self.values() for kind in spec.heads]

    def add(self, spec: MethodSpec) -> None:
        """Add a method. Raises InvalidParameter if another has its name."""
        if self._specs.get(spec.name, spec) is not spec:
            raise InvalidParameter(f"a method {spec.name!r} already exists; choose another name")
        self._specs[spec.name] = spec

    def _all(self) -> Mapping[str, MethodSpec]:
        if not self._has_searched:
            self._has_searched = True
            for point in entry_points(group=ENTRY_POINTS):
                self._add_entry_point(point)
        return self._specs

    def _add_entry_point(self, point: EntryPoint) -> None:
        try:
            self.add(_require_spec(point.load(), point.value))
        except Exception as error:  # third-party code must not break the other methods
            log.warning("the method %s (%s) cannot be used: %s", point.name, point.value, error)


# ``auto`` asks its sources in this order: cheap ones first.
BUILT_IN: tuple[MethodSpec, ...] = (
    auto_spec(lambda: METHODS.values()),
    autoregressive.spec,
    prediction.spec,
    prompt_lookup.spec,
    suffix.spec,
    recycling.spec,
    draft_model.spec,
    eagle.eagle_1,
    eagle.eagle_2,
    eagle.eagle_3,
    mtp.spec,
    dflash.spec,
    medusa.spec,
    redrafter.spec,
    lookahead.spec,
    jacobi.spec,
)
METHODS: MethodTable = MethodTable(BUILT_IN)
# What is learnt of these is saved from run to run; a source of ``auto`` may have a name of its own.
SAVED = frozenset(name for spec in BUILT_IN for name in (spec.name, spec.source_name))


def load_method_file(text: str) -> str:
    """Add the method given as ``FILE.py:SPEC`` or ``FILE.py:SPEC:parameter=value,…`` to the table.

    Runs the file, so ``text`` must come from the user who started the program. Returns the method
    in the form for ``parse_method``; returns any other text unchanged. Raises InvalidParameter.
    """
    match = re.fullmatch(r"(?P<file>.+\.py):(?P<name>\w+)(?P<rest>:.*)?", text)
    if match is None:
        return text
    path = Path(match["file"]).expanduser().resolve()
    found = getattr(_module(path), match["name"], None)
    spec = _require_spec(found, f"{path}:{match['name']}")
    METHODS.add(spec)
    return spec.name + (match["rest"] or "")


@cache
def _module(path: Path) -> ModuleType:
    """The module in a file; runs it once."""
    if not path.is_file():
        raise InvalidParameter(f"file not found: {path}; give FILE.py:SPEC")
    loader = SourceFileLoader(f"method_file.{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # dataclasses look up their module there
    try:
        loader.exec_module(module)
    except Exception as error:
        raise InvalidParameter(f"{path} failed: {type(error).__name__}: {error}") from error
    return module


def _require_spec(found: object, where: str) -> MethodSpec:
    if not isinstance(found, MethodSpec):
        raise InvalidParameter(f"{where} is not a MethodSpec; give FILE.py:SPEC")
    return found


def parse_method(text: str) -> Method:
    """Parse a method from ``name`` or ``name:parameter=value,parameter=value``.

    Raises InvalidParameter for an unknown method or parameter, or a value out of range.
    """
    require_types({"method": text}, {"method": str})
    name, _, rest = text.partition(":")
    spec = METHODS.get(name.strip())
    if spec is None:
        raise InvalidParameter(f"there is no method {name!r}; give one of {', '.join(METHODS)}")
    fields = {field.name: field for field in dataclasses.fields(spec.params)}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in fields:
            way_out = f"give some of {', '.join(fields)}" if fields else "it has none"
            raise InvalidParameter(f"{spec.name} has no parameter {key!r}; {way_out}")
        if not equals:
            raise InvalidParameter(f"{spec.name}: {key} has no value; write {key}=value")
        if key in values:
            raise InvalidParameter(f"{spec.name}: {key} is given twice; give it once")
        values[key] = _parse(spec.name, key, value, fields[key].default)
    params = spec.params(**values)
    spec.check(params)
    return Method(spec, params)


def parameter_docs(params: type[Any]) -> dict[str, str]:
    """The help of each field of a parameters dataclass; empty where it has none."""
    return {field.name: field.metadata.get("help", "") for field in dataclasses.fields(params)}


def _parse(method: str, name: str, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[
                text.lower()
            ]
        return kind(text)
    except (ValueError, KeyError):
        expected = "on or off" if kind is bool else f"a value like {default!r}"
        raise InvalidParameter(f"{method}: {name} is {text!r}; give {expected}") from None
