"""The written form of the messages between the server and the engine's process.

A message is a line: its kind, the number of its request (0 = it belongs to none), and the fields of
its dataclass as a JSON object. JSON's escapes keep a line ASCII. A tuple is an array, bytes are
base64, infinities are ``Infinity`` and ``-Infinity``, as Python writes them.

    reply 12 {"id":"tab","messages":[{"role":"user","content":"Hi"}],"method":"auto",…}
    tokens 12 {"pieces":[["Hel",false],["lo",true]],"ids":[312,88],"chances":[]}

To the engine's process:

    kind        dataclass    asks for
    ----------  -----------  --------------------------------------------------------------------
    load        ModelSpec    a model in place of the loaded one: waiting, loading … loaded, failed
    reply       ChatRequest  a reply: waiting, left_out, opening, prefill, tokens … done, failed
    tokenize    Tokenize     answer or failed, as the next two
    detokenize  Detokenize
    render      Render
    cancel      Cancel       the end of the request with this number
    close       Close        the end of the process, after closed

From it:

    kind        dataclass    says
    ----------  -----------  --------------------------------------------------------------------
    waiting     Waiting      how many others come first
    loading     Loading      a load's progress
    left_out    LeftOut      which turns the prompt leaves out
    opening     Opening      the reply starts with reasoning
    prefill     Prefill      the prompt's progress
    tokens      Tokens       more of the reply
    loaded      Loaded       the end of a load …
    done        Done         … of a reply …
    answer      Answer       … of a question …
    failed      Failed       … or of any of them; nothing follows these four
    status      Status       what is loaded, sent whenever it changes
    report      Report       slots, queue and totals, sent after changes, at most 10 times a second
    beat        Beat         the process is alive, once a second
    closed      Closed       the answer to close
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from app.worker import messages

KINDS: dict[str, Any] = {
    "load": messages.ModelSpec,
    "reply": messages.ChatRequest,
    "tokenize": messages.Tokenize,
    "detokenize": messages.Detokenize,
    "render": messages.Render,
    "cancel": messages.Cancel,
    "close": messages.Close,
    "waiting": messages.Waiting,
    "loading": messages.Loading,
    "left_out": messages.LeftOut,
    "opening": messages.Opening,
    "prefill": messages.Prefill,
    "tokens": messages.Tokens,
    "loaded": messages.Loaded,
    "done": messages.Done,
    "answer": messages.Answer,
    "failed": messages.Failed,
    "status": messages.Status,
    "report": messages.Report,
    "beat": messages.Beat,
    "closed": messages.Closed,
}
_KIND_OF = {dataclass: kind for kind, dataclass in KINDS.items()}


def written(number: int, message: Any) -> bytes:
    """The line of a message.

    Raises TypeError for a field that has no written form, RecursionError if one is nested too deep.
    """
    kind = _KIND_OF.get(type(message))
    if kind is None:
        raise TypeError(f"{type(message).__name__} is not a kind of message")
    return f"{kind} {number} {_encode(message)}\n".encode("ascii")


def head(line: bytes) -> tuple[str, int, bytes]:
    """A line's kind, number, and fields."""
    kind, number, text = line.split(b" ", 2)
    return kind.decode("ascii"), int(number), text


def read(kind: str, text: bytes) -> Any:
    """The message of this kind with these fields."""
    return _made(KINDS[kind], json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if is_dataclass(value):
        return vars(value)
    raise TypeError(f"{type(value).__name__} has no written form")


# Without the check, what contains itself is nested too deep.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain).encode


def _made(dataclass: Any, found: dict[str, Any]) -> Any:
    for name, make in _makers(dataclass):
        if name in found:
            found[name] = make(found[name])
    return dataclass(**found)


@cache
def _makers(dataclass: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """The fields that are not what JSON gives, with what makes them of it."""
    hints = get_type_hints(dataclass)
    found = [(item.name, _maker(hints[item.name])) for item in fields(dataclass)]
    return [(name, make) for name, make in found if make is not None]


def _maker(hint: Any) -> Callable[[Any], Any] | None:
    """What makes a value of a type of what JSON gives; None if that is the value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is bytes:
        return base64.b64decode
    if is_dataclass(hint):
        return partial(_made, hint)
    if origin in (Union, UnionType):  # of a dataclass and None, or of what JSON has
        made = [make for make in map(_maker, arguments) if make is not None]
        return partial(_optional, made[0]) if made else None
    if origin is not tuple:
        return None
    makers = list(map(_maker, arguments))
    if not any(makers):
        return tuple
    all_made = [make or _same for make in makers]
    return partial(_each if arguments[-1] is ... else _items, all_made)


def _optional(make: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else make(value)


def _each(makers: list[Callable[[Any], Any]], values: list[Any]) -> tuple[Any, ...]:
    return tuple(map(makers[0], values))


def _items(makers: list[Callable[[Any], Any]], values: list[Any]) -> tuple[Any, ...]:
    return tuple(make(value) for make, value in zip(makers, values, strict=True))


def _same(value: Any) -> Any:
    return value
