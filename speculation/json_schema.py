"""JSON schemas, as llguidance can follow them.

A reply is written as Python's ``json.dumps`` would, with one space after a colon or comma: then
most of what is not a value is forced, and need not be computed one token at a time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from batching.errors import GrammarError
from speculation.sandbox import one_limit, problem_of

log = logging.getLogger(__name__)

Schema = Mapping[str, Any] | bool
_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
        "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_LISTED = ("enum", "const")
_LARGEST = 10**18  # 64 bits hold it
_OF_TEXTS = ("pattern", "format")
# What not every grammar can enforce. Any other fault is one of the schema.
_RELAXED = (*_OF_TEXTS, "not", "if", "then", "else", "contains", "minContains", "maxContains",
            "uniqueItems", "propertyNames", "minProperties", "maxProperties", "patternProperties",
            "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
            "unevaluatedProperties", "multipleOf")  # fmt: skip


@one_limit()
def followed(schema: str | Schema, *, strict: bool = False) -> tuple[dict[str, Any], list[str]]:
    """``schema`` as llguidance takes it, and what of it is not enforced.

    Of objects with ``properties``, only those are written unless the schema mentions others.
    Keywords that no grammar can enforce are left out and named, such as ``not`` or a ``pattern``
    that looks ahead; with ``strict``, or if nothing would be left, that raises GrammarError.
    """
    text = schema if isinstance(schema, str) else ""
    try:
        found: Any = json.loads(schema) if isinstance(schema, str) else schema
        text = text or json.dumps(schema)
        if not isinstance(found, Mapping | bool):
            raise ValueError("it is not a JSON object")
        if found is False:
            raise ValueError("false allows no text at all")
        schema = _closed({} if found is True else found)
        problem = _problem(schema)
        if not problem:
            return _styled(schema), []
        if strict:
            raise ValueError(problem)
        left_out: list[str] = []
        relaxed = _relaxed(schema, "", left_out)
        if remaining := _problem(relaxed):
            raise ValueError(remaining)
        return _styled(relaxed), left_out
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GrammarError(
            f"the JSON schema cannot be followed: {reason}; it starts with {text[:60]!r}"
        ) from None


@lru_cache(maxsize=256)
def tell(where: str, *left_out: str) -> None:
    """Warn about what is not enforced, once for each schema."""
    if left_out:
        log.warning("%s is followed without %s", where, ", ".join(left_out))


def _styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": _OPTIONS}


def reason(problem: str) -> str:
    """What llguidance says, without the state of its parser."""
    return " ".join(problem.split("<state>")[0].split("\n\n")[0].split())[:300]


def _problem(schema: Mapping[str, Any]) -> str:
    """Why llguidance does not take ``schema``; empty if it does."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(_styled(schema)))
    return reason(problem_of(grammar))


def _relaxed(schema: Any, path: str, left_out: list[str]) -> Any:
    """``schema`` without the keywords that cannot be enforced, which are added to ``left_out``."""
    if not isinstance(schema, Mapping):
        return schema
    relaxed = _mapped(schema, path, lambda part, at: _relaxed(part, at, left_out))
    for keyword in [keyword for keyword in _RELAXED if keyword in relaxed]:
        alone = {keyword: relaxed[keyword], **({"type": "string"} if keyword in _OF_TEXTS else {})}
        if _problem(alone):
            left_out.append(f"{path}/{keyword}")
            del relaxed[keyword]
    return relaxed


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema`` with ``additionalProperties: false`` where nothing tells of other properties, and
    with bounds for integers.

    Models add properties or digits without end otherwise. Where schemas are combined, one part
    does not know the properties of another, so no object is closed.
    """
    is_combined = any(
        "allOf" in part or ("properties" in part and not part.keys().isdisjoint(_COMBINED))
        for part in _parts(schema)
    )

    def close(part: Any, _: str = "") -> Any:
        if not isinstance(part, Mapping):
            return part
        found = _mapped(part, "", close)
        if not is_combined and "properties" in found and found.keys().isdisjoint(_OPEN):
            found["additionalProperties"] = False
        if found.get("type") == "integer" and found.keys().isdisjoint(_LISTED):
            low = {} if "exclusiveMinimum" in found else {"minimum": -_LARGEST}
            high = {} if "exclusiveMaximum" in found else {"maximum": _LARGEST}
            found = {**low, **high, **found}
        return found

    closed: Mapping[str, Any] = close(schema)
    return closed


def _mapped(
    schema: Mapping[str, Any], path: str, change: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """``schema`` with ``change`` applied to the schemas in it, which get their paths."""
    found = dict(schema)
    for keyword, value in schema.items():
        at = f"{path}/{keyword}"
        if keyword in _MAP and isinstance(value, Mapping):
            found[keyword] = {name: change(part, f"{at}/{name}") for name, part in value.items()}
        elif keyword in _LIST and isinstance(value, list):
            found[keyword] = [change(part, f"{at}/{i}") for i, part in enumerate(value)]
        elif keyword in _ONE:
            found[keyword] = change(value, at)
    return found


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """``schema`` and all schemas in it."""
    if isinstance(schema, Mapping):
        yield schema
        inner: list[Any] = []
        _mapped(schema, "", lambda part, _: inner.append(part))
        for part in inner:
            yield from _parts(part)
