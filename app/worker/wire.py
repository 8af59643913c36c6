"""The written form of the messages between the server and the engine's process.

A message is a line: its kind, the number of its request (0 = it belongs to none), and the fields of
its dataclass as a JSON object. JSON's escapes keep a line ASCII. A tuple is an array, bytes are
base64, infinities and NaN are ``Infinity``, ``-Infinity`` and ``NaN``, as Python writes them.

    chat_request 12 {"id":"tab","messages":[{"role":"user","content":"Hi"}],"method":"auto",…}
    tokens 12 {"pieces":[["Hel",false],["lo",true]],"ids":[312,88],"chances":[]}

To the engine's process:

    kind          asks for
    ------------  --------------------------------------------------------------------
    model_spec    a model in place of the loaded one: waiting, loading … loaded, failed
    chat_request  a reply: waiting, left_out, opening, prompt_tokens, prefill, steps, tokens …
                  done, failed
    tokenize      answer or failed, as the next three
    detokenize
    render
    embed
    unload        answer, when the model is freed
    cancel        the end of the request with this number
    close         the end of the process

From it:

    kind          says
    ------------  --------------------------------------------------------------------
    waiting       how many others come first
    loading       a load's progress
    left_out      which turns the prompt leaves out
    opening       how to read the reply
    prompt_tokens  more of the prompt's tokens, with their probabilities
    prefill       the prompt's progress
    steps         how the next tokens came about, if that is asked for
    tokens        more of the reply
    loaded        the end of a load …
    done          … of a reply …
    answer        … of a question …
    failed        … or of any of them; nothing follows these four
    status        what is loaded, sent whenever it changes
    report        slots, queue and totals, sent after changes, at most 10 times a second
    beat          the process is alive, once a second
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from queue import SimpleQueue
from types import UnionType
from typing import IO, Any, Union, get_args, get_origin, get_type_hints

from app.worker import messages as m

_QUESTIONS = (m.Tokenize, m.Detokenize, m.Render, m.Embed, m.Unload)
_TO_ENGINE = (m.ModelSpec, m.ChatRequest, *_QUESTIONS, m.Cancel, m.Close)
_BEGIN = (m.Waiting, m.Loading, m.LeftOut, m.Opening, m.PromptTokens, m.Prefill)
_EVENTS = (*_BEGIN, m.Steps, m.Tokens, *m.LAST)
_PUBLISHED = (m.Status, m.Report, m.Beat)
_KINDS: dict[Any, str] = {
    each: re.sub("(?<=.)([A-Z])", r"_\1", each.__name__).lower()
    for each in (*_TO_ENGINE, *_EVENTS, *_PUBLISHED)
}
DATACLASSES = {kind: dataclass for dataclass, kind in _KINDS.items()}


def written(number: int, message: Any) -> bytes:
    """The line of a message.

    Raises TypeError for a field that has no written form, RecursionError if one is nested too deep.
    """
    kind = _KINDS.get(type(message))
    if kind is None:
        raise TypeError(f"{type(message).__name__} is no message")
    return f"{kind} {number} {_encode(message)}\n".encode("ascii")


def head(line: bytes) -> tuple[str, int, str]:
    """A line's kind, number, and fields."""
    kind, number, text = line.decode("ascii").split(" ", 2)
    return kind, int(number), text


def read(kind: str, text: str) -> Any:
    """The message of this kind with these fields. Raises RecursionError."""
    return _made(DATACLASSES[kind], _decode(text))


class Outbox:
    """Messages on their way into a pipe. A thread writes them, so a full pipe holds up nobody else:
    not an event loop with a large request, and not the engine when the server is stopped.

    For the engine's tokens the thread costs nothing that could be measured: the bundled model wrote
    490 tokens a second with it and 440 without (medians of 30 in turn, runs varied by 10%).
    """

    def __init__(
        self,
        pipe: IO[bytes],
        on_broken: Callable[[], object] = lambda: None,
        on_refused: Callable[[int, Exception], object] = lambda number, error: None,
    ) -> None:
        """``on_broken`` is called when nobody reads any more, ``on_refused`` with the number of a
        message that cannot be written, and what ``written`` raises."""
        self._messages: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._pipe, self._on_broken, self._on_refused = pipe, on_broken, on_refused
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, number: int, message: Any) -> None:
        self._messages.put((number, message))

    def close(self, seconds: float = 0.0) -> None:
        """Send no more; wait so long at most until all is written."""
        self._messages.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        for number, message in iter(self._messages.get, None):
            try:
                line = written(number, message)
            except (TypeError, RecursionError) as error:
                self._on_refused(number, error)
                continue
            try:
                self._pipe.write(line)
                self._pipe.flush()
            except (OSError, ValueError):  # closed at either end
                self._on_broken()
                return


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if is_dataclass(value):
        return vars(value)
    raise TypeError(f"{type(value).__name__} has no written form")


# Without the check, what contains itself is nested too deep.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain).encode
_decode = json.JSONDecoder().decode  # quicker than ``loads``


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
    if origin is None and isinstance(hint, type) and issubclass(hint, tuple):  # with names
        by_field = [_maker(field) or _same for field in get_type_hints(hint).values()]
        return lambda values: hint(*_items(by_field, values))
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
