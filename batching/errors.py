"""The exceptions. Every error names the cause, the value and the way out.

A class of its own is for those who catch it. C return codes become exceptions only in
``batching.llama``.

A message names settings in braces, ``raise {n_ctx}``, because a setting is called differently in
Python, on the command line and on the page. ``str(error)`` uses the Python names,
``error.worded(names)`` those of a front end.

>>> error = PromptTooLong("raise {n_ctx}", settings=("n_ctx",))
>>> error.worded({"n_ctx": "--ctx"})
'raise --ctx'
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


class SpeculationError(Exception):
    """Base class of this project's errors.

    settings   Python names of the settings to change; the message has them in braces
    requested  the amount requested, if the error is about one
    available  the amount available
    """

    def __init__(
        self,
        message: str = "",
        *,
        settings: Sequence[str] = (),
        requested: int | None = None,
        available: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.settings = tuple(settings)
        self.requested = requested
        self.available = available

    def __str__(self) -> str:
        return self.worded({})

    def worded(self, names: Mapping[str, str]) -> str:
        """The message with each setting's name in ``names``; others keep their Python names."""
        message = self.message
        for setting in self.settings:
            message = message.replace(f"{{{setting}}}", names.get(setting, setting))
        return message


class ModelError(SpeculationError):
    """The model, its heads or a worker that computes a part of it cannot be used."""


class UnsupportedModel(ModelError):
    """This build of llama.cpp cannot run the model, or it is not for this use."""


class CannotRewind(ModelError):
    """The model's memory cannot drop part of a sequence, so drafts cannot be rolled back."""


class ContextError(SpeculationError):
    """The context cannot serve the request, or a decode failed."""


class OutOfMemory(ContextError):
    """Not enough memory for the model, or for a context of this size."""


class PromptTooLong(ContextError):
    """The prompt does not fit the context."""


class CacheFull(ContextError):
    """``llama_decode`` found no free cells for the rows (return code 1)."""


class TreeError(SpeculationError):
    """The token tree is unsound, or does not fit a batch or its sequences."""


class InvalidParameter(SpeculationError, ValueError):
    """A parameter is unknown or outside its range."""


class MissingResource(InvalidParameter):
    """The method needs a draft model or drafting heads, and none are loaded."""


class GrammarError(SpeculationError, ValueError):
    """A grammar, a regular expression or a JSON schema that cannot be followed."""


def utf8(text: str) -> bytes:
    """``text`` in UTF-8. Raises InvalidParameter for half a character: a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"a text has {text[error.start]!r}, which is half a character or an undecodable byte, "
            f"at position {error.start}; give valid UTF-8 text"
        ) from None


def check_ranges(params: Any, ranges: tuple[tuple[str, float, float], ...]) -> None:
    """Check fields of ``params``, unless they are None, against ranges ``(name, lowest, highest)``.

    Raises InvalidParameter with the name, the value and the range, or as ``require_types``.
    """
    kind: Any = type(params)
    require_types(vars(params), hints_of(kind))
    for name, low, high in ranges:
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise InvalidParameter(f"{{{name}}} is {value}; give {low} to {high}", settings=(name,))


@lru_cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """The types of the fields of a dataclass or a TypedDict."""
    return get_type_hints(kind)


def require_types(given: Mapping[str, object], hints: Mapping[str, Any]) -> None:
    """Check values against types, by name. Numbers may be NumPy's, and sequences arrays.

    Raises InvalidParameter with the name, the value and what it may be.
    """
    for name, hint in hints.items():
        if name in given and not _fits(given[name], hint):
            raise InvalidParameter(
                f"{{{name}}} is {given[name]!r:.60}; give {_in_words(hint)}", settings=(name,)
            )


def _fits(value: object, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Callable:
        return callable(value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind in (Sequence, Collection, tuple):
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            return False
        # Token ids are checked where their vocabulary is known.
        return inner[0] is int or all(_fits(one, inner[0]) for one in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items()
        )
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "True or False",
    NoneType: "None",
    Callable: "a function",
}


def _in_words(hint: Any) -> str:
    """What fits a type: ``an integer or None``."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_in_words, inner))
    if kind is Mapping and Any not in inner:
        return f"a mapping from {_in_words(inner[0])} to {_in_words(inner[1])}"
    if kind in (Sequence, Collection, tuple):
        return f"a list with {_in_words(inner[0])} each"
    return _WORDS.get(kind, f"a {kind.__name__}")
