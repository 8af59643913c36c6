"""Messages and their written form."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from app.worker import messages, wire
from app.worker.messages import Chance, ChatRequest, Failed, Tokens
from app.worker.wire import DATACLASSES, Outbox, head, read, written


def example(hint: Any, text: str = 'a "😀" \ud800\n') -> Any:
    """A value of a type, with something in each part of it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{item.name: example(hints[item.name]) for item in fields(hint)})  # type: ignore[operator]
    if origin in (Union, UnionType):
        return example(arguments[0])
    if origin is None and issubclass(hint, tuple):  # with names
        return hint(*map(example, get_type_hints(hint).values()))
    if origin is tuple:
        parts = arguments[:1] * 2 if arguments[-1] is ... else arguments
        return tuple(map(example, parts))
    if origin is not None:  # a mapping
        return {text: [1, 0.1, {"x": None}], "": float("-inf")}
    return {str: text, int: -3, float: 1e-300, bool: True, bytes: b"\xff\n\0"}[hint]


@pytest.mark.parametrize("kind", DATACLASSES)
def test_a_message_that_was_written_is_read_as_it_was(kind: str) -> None:
    whole = example(DATACLASSES[kind])
    for message in (whole, replace(whole, **dict.fromkeys(optional(type(whole))))):
        line = written(12, message)
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        found, number, text = head(line)
        assert (found, number) == (kind, 12)
        assert read(found, text) == message


def optional(dataclass: Any) -> list[str]:
    hints = get_type_hints(dataclass)
    return [name for name, hint in hints.items() if type(None) in get_args(hint)]


def test_the_documented_form_is_the_form() -> None:
    tokens = Tokens((("Hel", False), ("lo", True)), (312, 88))
    assert written(12, tokens).decode().strip() in str(wire.__doc__)
    chances = ((Chance(7, b"\xe6", -0.5), (Chance(8, b"a", float("-inf")),)),)
    assert written(3, Tokens((("", True),), (7,), chances)) == (
        b'tokens 3 {"pieces":[["",true]],"ids":[7],"chances":[[{"id":7,"piece":"5g==",'
        b'"logprob":-0.5},[{"id":8,"piece":"YQ==","logprob":-Infinity}]]]}\n'
    )
    documented = re.findall(r"^    ([a-z_]+)(?=  |$)", str(wire.__doc__), re.MULTILINE)
    assert [kind for kind in documented if kind != "kind"] == list(DATACLASSES)
    assert set(get_args(messages.Event)) <= set(DATACLASSES.values())


def test_what_cannot_be_written_says_why() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        written(1, ChatRequest("", sampling={"json_schema": deep}))
    with pytest.raises(TypeError, match="function has no written form"):
        written(1, ChatRequest("", sampling={"grammar": lambda: None}))
    with pytest.raises(TypeError, match="NoneType is no message"):
        written(1, None)


def test_a_full_pipe_holds_up_nobody_and_the_messages_come_in_order() -> None:
    ends = [os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]
    refused: list[tuple[int, str]] = []
    outbox = Outbox(ends[1], on_refused=lambda n, error: refused.append((n, str(error))))
    sent: list[Any] = [Failed("x" * 50_000) for _ in range(20)]  # a pipe holds 64 kB or so
    for number, message in enumerate([*sent, None, Failed("end")], 1):
        outbox.put(number, message)
    lines = [ends[0].readline() for _ in range(21)]
    assert lines == [written(n, message) for n, message in enumerate(sent, 1)] + [
        written(22, Failed("end"))
    ]
    assert refused == [(21, "NoneType is no message")]
    outbox.close(60)
    assert not outbox._thread.is_alive()
    ends[0].close()
    broken = threading.Event()
    outbox = Outbox(ends[1], broken.set)
    outbox.put(1, Failed("nobody reads it"))
    assert broken.wait(60)
    with suppress(BrokenPipeError):
        ends[1].close()
