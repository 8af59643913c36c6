"""What the target reads to learn from: texts, chats, or its own replies to prompts.

Files are plain text (UTF-8), or JSON Lines, perhaps gzipped, each line one of

    {"text": "..."}                                           plain text
    {"messages": [{"role": "user", "content": "..."}, ...]}   a chat with its replies
    {"prompt": "..."} or {"turns": ["...", ...]}              prompts, for the target to reply to
    {"ids": [1, 17, ...], "spans": [[5, 40], ...]}            tokens of this very target, and which
                                                              of them it wrote itself, if told
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from batching.llama.model import Model
from speculation.chat.template import ROLES, Message, chat_prompt
from speculation.engine import Engine
from speculation.system.files import not_utf8, read_text
from speculation.train import TrainError

_BEGINNING = 32  # tokens of a plain text that the target goes on from


@dataclass(frozen=True)
class Piece:
    """Tokens that are read in one go.

    spans  (start, end) of each part that the target wrote; None where it wrote nothing, and all of
           the text is learnt from
    """

    ids: list[int]
    spans: list[tuple[int, int]] | None = None

    def cut(self, start: int, end: int) -> Piece:
        """The tokens from ``start`` to ``end``."""
        if self.spans is None:
            return Piece(self.ids[start:end])
        inside = [(max(a, start) - start, min(b, end) - start) for a, b in self.spans]
        return Piece(self.ids[start:end], [(a, b) for a, b in inside if a < b])


# What a line, or a whole file of plain text, holds: text, prompts, a chat, or tokens.
Sample = str | tuple[str, ...] | list[Message] | Piece


def read_texts(model: Model, files: Sequence[Path], length: int, skip: int = 0) -> Iterator[Piece]:
    """The tokens of every text, cut to pieces of ``length``; without the first ``skip`` pieces.

    Raises TrainError for a line in another form, prompts without replies among them.
    """
    for sample in _samples(files):
        if isinstance(sample, str):
            sample = Piece(model.tokenize(sample))
        elif isinstance(sample, tuple):
            raise TrainError("the data are prompts without replies; give --generate N as well")
        elif isinstance(sample, list):
            sample = Piece(chat_prompt(model, sample).tokens)
        elif sample.ids and max(sample.ids) >= model.n_vocab:
            raise TrainError(
                f"the data have token {max(sample.ids)}; this model has 0 to {model.n_vocab - 1}: "
                f"give tokens of this very model"
            )
        for start in range(0, len(sample.ids), length):
            if skip > 0:
                skip -= 1
            else:
                yield sample.cut(start, start + length)


def own_replies(
    engine: Engine, files: Sequence[Path], length: int, n_tokens: int, skip: int = 0
) -> Iterator[Piece]:
    """The target's own greedy continuations, ``n_tokens`` long at most, with what they continue.

    Of a chat every user turn is replied to anew; a plain text, or tokens, are continued from their
    beginning. The first ``skip`` samples are passed over, since they were continued before.

    Raises TrainError after the last sample when there was room for none.
    """
    any_had_room = skip > 0
    too_long: list[int] = []  # tokens of prompts
    for number, sample in enumerate(_samples(files)):
        if number < skip:
            continue
        if isinstance(sample, str):
            prompt = engine.model.tokenize(sample)[:_BEGINNING]
            piece = _continued(engine, prompt, length, n_tokens, too_long)
        elif isinstance(sample, Piece):
            prompt = sample.ids[:_BEGINNING]
            piece = _continued(engine, prompt, length, n_tokens, too_long)
        else:
            chat = (
                [{"role": "user", "content": turn} for turn in sample]
                if isinstance(sample, tuple)
                else sample
            )
            piece = _replied(engine, chat, length, n_tokens, too_long)
        any_had_room = any_had_room or bool(piece.ids)
        yield piece
    if too_long and not any_had_room:
        raise TrainError(
            f"none of {len(too_long)} prompts has room for --generate {n_tokens} in a context of "
            f"{length}: the shortest has {min(too_long)} tokens; give --ctx "
            f"{min(too_long) + n_tokens} or more, or a lower --generate"
        )


def _replied(
    engine: Engine, chat: Sequence[Message], length: int, n_tokens: int, too_long: list[int]
) -> Piece:
    """A chat's user turns with replies by the target, as far as ``length`` allows.

    The chat is written anew for each turn: what of an earlier reply is not the same tokens then
    (templates drop a reply's reasoning, and text may be cut into other tokens) is not learnt from.
    Where even the first turn has no room, its tokens are counted into ``too_long``.
    """
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    conversation: list[Message] = []
    for message in chat:
        if message["role"] == "assistant":
            continue
        conversation.append(message)
        if message["role"] == "user":
            prompt = chat_prompt(engine.model, conversation).tokens
            if len(prompt) + n_tokens > length:
                if not ids:
                    too_long.append(len(prompt))
                break
            text = engine.generate(prompt, max_tokens=n_tokens).run()
            spans = [span for span in spans if ids[: span[1]] == prompt[: span[1]]]
            ids = [*prompt, *text.token_ids]
            spans.append((len(prompt), len(ids)))
            conversation.append({"role": "assistant", "content": text.text})
    return Piece(ids, spans)


def _continued(
    engine: Engine, prompt: list[int], length: int, n_tokens: int, too_long: list[int]
) -> Piece:
    most = min(n_tokens, length - len(prompt))
    if most < 1:
        too_long.append(len(prompt))
    if not prompt or most < 1:
        return Piece([], [])
    ids = [*prompt, *engine.generate(prompt, max_tokens=most).run().token_ids]
    return Piece(ids, [(len(prompt), len(ids))])


def _samples(files: Sequence[Path]) -> Iterator[Sample]:
    for file in files:
        if not {".jsonl", ".json"} & set(file.suffixes):
            yield read_text(file)
            continue
        for number, line in _lines(file):
            if line.strip():
                yield _sample(line, f"{file}, line {number}")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1.

    Raises InvalidParameter where it is no UTF-8, TrainError where it is cut or damaged.
    """
    open_text = gzip.open if file.suffix == ".gz" else open
    try:
        with open_text(file, "rt", encoding="utf-8-sig") as lines:
            yield from enumerate(lines, 1)
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TrainError(
            f"{file} is no whole gzip file ({error}); fetch it, or make it, again"
        ) from None


def _sample(line: str, where: str) -> Sample:
    try:
        found = json.loads(line)
        if isinstance(found.get("text"), str):
            return str(found["text"])
        if isinstance(found.get("prompt"), str):
            return (found["prompt"],)
        if "ids" in found:
            return _tokens(found["ids"], found.get("spans"), where)
        for key, kind in (("turns", str), ("messages", dict)):
            items = found.get(key)
            if isinstance(items, list) and all(isinstance(item, kind) for item in items):
                return tuple(items) if key == "turns" else _chat(items, where)
    except (ValueError, TypeError, AttributeError):
        pass
    raise TrainError(
        f"{where} is {line.strip()[:60]!r}; give an object with text, messages, prompt, turns or "
        f"ids on each line"
    )


def _tokens(ids: object, spans: object, where: str) -> Piece:
    """Raises TrainError for what is no token, ValueError or TypeError for another form."""
    if not isinstance(ids, list):
        raise TypeError
    for token in ids:
        if type(token) is not int or not 0 <= token < 2**31:
            raise TrainError(f"{where}: {token!r} is no token; give whole numbers from 0")
    if spans is None:
        return Piece(ids)
    if not isinstance(spans, list):
        raise TypeError
    parts = [(start, end) for start, end in spans]
    for start, end in parts:
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(ids):
            raise TrainError(
                f"{where}: the span [{start!r}, {end!r}] is no part of {len(ids)} tokens; give its "
                f"first token, from 0, and the one after its last"
            )
    return Piece(ids, parts)


def _chat(messages: list[Message], where: str) -> list[Message]:
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise TrainError(
                f"{where}: message {number} is {dict(message)!r:.60}; give a role of "
                f"{', '.join(ROLES)} and its content as text"
            )
    return messages
