"""Messages and their written form."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from io import BytesIO
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from app.worker.messages import ChatRequest, Failed
from app.worker.wire import KINDS, Outbox, message_of, naming, read, written


def example(hint: Any, text: str = 'a "😀"\n') -> Any:
    """A value of a type, with something in each part of it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{item.name: example(hints[item.name], text) for item in fields(hint)})  # type: ignore[operator]
    if origin in (Union, UnionType):
        return example(arguments[0], text)
    if origin is None and issubclass(hint, tuple):  # with names
        return hint(*(example(each, text) for each in get_type_hints(hint).values()))
    if origin is tuple:
        parts = arguments[:1] * 2 if arguments[-1] is ... else arguments
        return tuple(example(part, text) for part in parts)
    if origin is not None and arguments[1] is not Any:  # a mapping
        return {text: example(arguments[1], text)}
    if origin is not None:
        return {text: [1, 0.1, {"x": None}], "": float("-inf")}
    return {str: text, int: -3, float: 1e-300, bool: True, bytes: b"\xff\n\0"}[hint]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_was_written_is_read_as_it_was(kind: type[Any]) -> None:
    whole = example(kind)
    for message in (whole, replace(whole, **dict.fromkeys(optional(kind)))):
        assert read_again(written(12, message)) == (12, message)


def read_again(frame: bytes) -> tuple[int, Any]:
    """What a message with this written form is read as."""
    pipe = BytesIO(frame)
    found = read(pipe)
    assert found is not None and read(pipe) is None  # nothing is left
    number, kind, body = found
    return number, message_of(kind, body)


def optional(dataclass: Any) -> list[str]:
    hints = get_type_hints(dataclass)
    return [name for name, hint in hints.items() if type(None) in get_args(hint)]


def test_every_kind_is_documented() -> None:
    for kind in KINDS:  # a dataclass without a docstring has its signature as one
        assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), kind


def test_a_message_that_is_cut_off_is_the_end_of_the_pipe() -> None:
    frame = written(3, Failed("x"))
    for n_bytes in (0, 3, len(frame) - 1):
        assert read(BytesIO(frame[:n_bytes])) is None


def test_fields_are_found_in_a_body_and_in_a_schema_that_is_a_text() -> None:
    found = naming("pattern", "$ref")
    for sampling in (
        {"json_schema": {"pattern": "a"}},
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": '{"\\"pattern\\": 1}'},
    ):
        assert found.search(written(1, ChatRequest("", sampling=sampling)))
    said = ({"role": "user", "content": 'a pattern of "$ref"s'},)
    assert not found.search(written(1, ChatRequest("", said)))


def test_what_cannot_be_written_says_why() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        written(1, ChatRequest("", sampling={"json_schema": deep}))
    with pytest.raises(TypeError, match="type function is unsupported"):
        written(1, ChatRequest("", sampling={"grammar": lambda: None}))
    with pytest.raises(UnicodeEncodeError):
        written(1, Failed("\ud800"))
    with pytest.raises(TypeError, match="NoneType is no message"):
        written(1, None)


def test_a_full_pipe_holds_up_nobody_and_the_messages_come_in_order() -> None:
    ends = [os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]
    refused: list[tuple[int, str]] = []
    outbox = Outbox(ends[1], on_refused=lambda n, error: refused.append((n, str(error))))
    sent: list[Any] = [Failed("x" * 50_000) for _ in range(20)]  # a pipe holds 64 kB or so
    for number, message in enumerate([*sent, None, Failed("end")], 1):
        outbox.put(number, message)
    came = [read(ends[0]) for _ in range(21)]
    assert [frame and frame[0] for frame in came] == [*range(1, 21), 22]
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
