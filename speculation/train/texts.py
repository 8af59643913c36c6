"""Training data: reads texts, chats and prompts, and has the target reply to prompts.

A file is plain UTF-8 text, or JSON Lines, optionally gzipped, with one of these on each line:

    {"text": "..."}                                           plain text
    {"messages": [{"role": "user", "content": "..."}, ...]}   a chat with its replies
    {"prompt": "..."} or {"turns": ["...", ...]}              prompts, for the target to answer
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from batching.llama.context import ContextParams
from batching.llama.model import Model
from speculation.chat.template import ROLES, Message, chat_prompt
from speculation.engine import Engine
from speculation.system.files import not_utf8, read_text
from speculation.train import TrainError

REPLIES_AT_ONCE = 16
_METHOD = "ar"  # many texts at once fill a batch without drafts
_PREFIX_TOKENS = 32  # how much of a plain text the target is given to continue


@dataclass(frozen=True)
class Sample:
    """Token ids that the target reads as one sequence.

    spans  (start, end) of each part that the target generated, the only parts used for training;
           None = the whole sequence is used
    """

    ids: list[int]
    spans: list[tuple[int, int]] | None = None

    def cut(self, start: int, end: int) -> Sample:
        """The tokens from ``start`` up to ``end``."""
        if self.spans is None:
            return Sample(self.ids[start:end])
        inside = [(max(a, start) - start, min(b, end) - start) for a, b in self.spans]
        return Sample(self.ids[start:end], [(a, b) for a, b in inside if a < b])


# The content of a JSON line or of a plain text file: text, or a chat or its prompts.
Record = str | list[Message]


def read_texts(model: Model, files: Sequence[Path], length: int, skip: int = 0) -> Iterator[Sample]:
    """Tokenize every text and split it into samples of ``length``; drop the first ``skip`` samples.

    Raises TrainError for a malformed line and for prompts without replies.
    """
    for record in _records(files):
        if isinstance(record, str):
            ids = model.tokenize(record)
        elif all(message["role"] != "assistant" for message in record):
            raise TrainError("the data has prompts without replies; add --generate N")
        else:
            ids = chat_prompt(model, record).tokens
        for start in range(0, len(ids), length):
            if skip > 0:
                skip -= 1
            else:
                yield Sample(ids[start : start + length])


def replying(path: Path, context: ContextParams, n_gpu_layers: int | None) -> Engine:
    """The target, loaded to write ``REPLIES_AT_ONCE`` replies at once."""
    return Engine.load(
        path, context, parallel=REPLIES_AT_ONCE, mtp=False, n_gpu_layers=n_gpu_layers
    )


def _reply(engine: Engine, prompt: list[int], n_tokens: int) -> tuple[list[int], str]:
    """The target's greedy continuation: its tokens and its text."""
    text = engine.submit(prompt, max_tokens=n_tokens, method=_METHOD).run()
    return list(text.token_ids), text.text


def generate_replies(
    engine: Engine, files: Sequence[Path], length: int, n_tokens: int, skip: int = 0
) -> Iterator[Sample]:
    """Prompts with the target's own greedy continuations of at most ``n_tokens`` tokens.

    In a chat, the target replies to every user turn; the replies in the data are dropped. Plain
    text is continued after its first ``_PREFIX_TOKENS`` tokens. The first ``skip`` records are
    skipped: an earlier run continued them. As many records are continued at once as ``engine`` has
    room for; they are returned in their order.

    Raises TrainError at the end if no prompt fitted into ``length``.
    """
    any_fits = skip > 0
    too_long: list[int] = []  # lengths of the prompts that did not fit

    def reply(record: Record) -> Sample:
        if isinstance(record, list):
            return _reply_to_chat(engine, record, length, n_tokens, too_long)
        prompt = engine.model.tokenize(record)[:_PREFIX_TOKENS]
        return _continue_text(engine, prompt, length, n_tokens, too_long)

    for sample in _in_order(reply, islice(_records(files), skip, None), engine.parallel):
        any_fits = any_fits or bool(sample.ids)
        yield sample
    if too_long and not any_fits:
        raise TrainError(
            f"none of the {len(too_long)} prompts leaves room for --generate {n_tokens} in a "
            f"context of {length}: the shortest has {min(too_long)} tokens; raise --ctx to at "
            f"least {min(too_long) + n_tokens} or lower --generate"
        )


def _in_order(
    function: Callable[[Record], Sample], records: Iterator[Record], at_once: int
) -> Iterator[Sample]:
    """``function`` of each record in its order, ``at_once`` of them in threads at a time.

    Twice as many are begun, so that one long text does not keep the others waiting.
    """
    pool = ThreadPoolExecutor(at_once)
    begun: deque[Future[Sample]] = deque()
    try:
        for record in records:
            begun.append(pool.submit(function, record))
            if len(begun) == 2 * at_once:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _reply_to_chat(
    engine: Engine, chat: Sequence[Message], length: int, n_tokens: int, too_long: list[int]
) -> Sample:
    """A chat's user turns with the target's replies, as many as fit into ``length``.

    The chat is rendered again for each turn, which can change the tokens of earlier replies:
    templates drop reasoning, and text may be tokenized differently. Changed replies are excluded
    from training. If even the first turn does not fit, its length is added to ``too_long``.
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
            reply, content = _reply(engine, prompt, n_tokens)
            spans = [span for span in spans if ids[: span[1]] == prompt[: span[1]]]
            ids = [*prompt, *reply]
            spans.append((len(prompt), len(ids)))
            conversation.append({"role": "assistant", "content": content})
    return Sample(ids, spans)


def _continue_text(
    engine: Engine, prompt: list[int], length: int, n_tokens: int, too_long: list[int]
) -> Sample:
    max_tokens = min(n_tokens, length - len(prompt))
    if max_tokens < 1:
        too_long.append(len(prompt))
    if not prompt or max_tokens < 1:
        return Sample([], [])
    ids = [*prompt, *_reply(engine, prompt, max_tokens)[0]]
    return Sample(ids, [(len(prompt), len(ids))])


def _records(files: Sequence[Path]) -> Iterator[Record]:
    for file in files:
        if not {".jsonl", ".json"} & set(file.suffixes):
            yield read_text(file)
            continue
        for number, line in _lines(file):
            if line.strip():
                yield _parse_line(line, f"{file}, line {number}")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The file's lines, numbered from 1.

    Raises InvalidParameter if it is not UTF-8, TrainError if a gzip file is damaged.
    """
    open_text = gzip.open if file.suffix == ".gz" else open
    try:
        with open_text(file, "rt", encoding="utf-8-sig") as lines:
            yield from enumerate(lines, 1)
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TrainError(
            f"{file} is not a complete gzip file ({error}); download or create it again"
        ) from None


def _parse_line(line: str, where: str) -> Record:
    try:
        found = json.loads(line)
        if isinstance(found.get("text"), str):
            return str(found["text"])
        turns = [found["prompt"]] if "prompt" in found else found.get("turns")
        if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
            return [{"role": "user", "content": turn} for turn in turns]
        messages = found.get("messages")
        if isinstance(messages, list) and all(isinstance(item, dict) for item in messages):
            return _check_chat(messages, where)
    except (ValueError, TypeError, AttributeError):
        pass
    raise TrainError(
        f"{where} is {line.strip()[:60]!r}; each line must be an object with text, messages, "
        f"prompt or turns"
    )


def _check_chat(messages: list[Message], where: str) -> list[Message]:
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise TrainError(
                f"{where}: message {number} is {dict(message)!r:.60}; each message needs a role "
                f"({', '.join(ROLES)}) and a content string"
            )
    return messages
