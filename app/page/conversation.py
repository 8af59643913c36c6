"""A conversation: its turns and replies, and how to ask, retry, edit, undo, continue and export.

Knows the backend's messages, but nothing of Gradio or HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from app.page.files import File, with_files
from app.worker.backend import Backend
from app.worker.messages import (
    ChatRequest,
    Done,
    Event,
    Failed,
    LeftOut,
    Opening,
    Prefill,
    Tokens,
    Waiting,
)
from speculation.chat.reasoning import ReasoningSpan, answer_of, find_reasoning
from speculation.chat.truncation import without_turns
from speculation.drafter import BASELINE
from speculation.settings import DEFAULT_METHOD

INTERVAL = 0.1  # seconds between display updates; more of them would keep a slow page busy
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
LEAST_TIMED = 8  # tokens; with fewer, the measured speed is noise
# A ratio of two speeds needs more: in half a second, a pause of 20 ms changes a speed by 4 %.
LEAST_COMPARED = 64  # tokens
LEAST_COMPARED_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """The user's settings for the next reply.

    compare    measure plain decoding after the reply
    leave_out  leave out the oldest turns if the context is too small for all
    """

    method: str = DEFAULT_METHOD
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    system: str = ""
    compare: bool = False
    thinking: bool | None = None
    leave_out: bool = True


@dataclass(frozen=True)
class PlainRun:
    """A plain-decoding run of the same request, to compare a reply's speed with.

    n_tokens and seconds are the timed part; 0 in runs saved by older versions.
    """

    tokens_per_second: float
    text: str
    n_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, done: Done, text: str) -> PlainRun:
        return cls(tokens_per_second(done), text, _n_timed(done), done.decode_seconds)


@dataclass
class Reply:
    """A reply, finished or still being generated.

    pieces      the text of each token, and whether it was drafted
    notice      progress to show before there is text
    opening     the mark that opens the reasoning, if the prompt contains it instead of the reply
    thinking    whether the model was told to reason
    n_left_out  how many earlier turns the prompt left out
    """

    method: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    notice: str = ""
    done: Done | None = None
    error: str = ""
    plain: PlainRun | None = None
    opening: str = ""
    thinking: bool | None = None
    n_left_out: int = 0

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def model_name(self) -> str:
        """The model's name or file name; empty until the reply is done."""
        model = self.done.model if self.done is not None else None
        return Path(model.spec.model).name if model is not None else ""

    @property
    def reasoning(self) -> ReasoningSpan | None:
        """The reasoning's place in the text."""
        return find_reasoning(self.text, self.opening)

    @property
    def answer(self) -> str:
        """The text without its reasoning; all of the text until the reasoning has ended."""
        return answer_of(self.text, self.opening)

    @property
    def is_cut_short(self) -> bool:
        """Whether the user or a limit stopped the reply, so that it can be continued."""
        ends = self.done.finish_reason if self.done is not None else "cancelled"
        return bool(self.pieces) and ends in ("cancelled", "length", "context")

    def apply(self, event: Event) -> None:
        """Update the reply from an event of the backend."""
        if isinstance(event, Tokens):
            self.notice = ""
            self.pieces.extend(event.pieces)
        elif isinstance(event, Waiting):
            self.notice = waiting_notice(event)
        elif isinstance(event, LeftOut):
            self.n_left_out = event.n_turns
        elif isinstance(event, Prefill):
            self.notice = f"Reading the prompt: {event.done} of {event.total} tokens"
        elif isinstance(event, Opening):
            if not self.pieces:  # a continued reply already has its opening
                self.opening = event.mark
        elif isinstance(event, Done):
            self.notice = ""
            self.done = event
        elif isinstance(event, Failed):
            self.notice = ""
            self.error = event.message


@dataclass
class Turn:
    """A user's message and the reply to it.

    files   the files attached to the message
    before  the reply that was cut short, until its continuation starts
    n_ctx   the context's size, if it was full and the prompt begins with this turn; else 0
    """

    user: str
    reply: Reply | None = None
    before: Reply | None = None
    n_ctx: int = 0
    files: tuple[File, ...] = ()

    @property
    def said(self) -> str:
        """The message as the model reads it."""
        return with_files(self.user, self.files)

    @property
    def shown(self) -> Reply | None:
        return self.reply or self.before

    @property
    def has_text(self) -> bool:
        """Whether the turn has a reply with text, so that prompts include it."""
        return self.reply is not None and bool(self.reply.text)


class Conversation:
    """Turns in order, and plain-decoding runs by request."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.plain_runs: dict[str, PlainRun] = {}

    def ask(self, text: str, files: tuple[File, ...] = ()) -> None:
        self.turns.append(Turn(text, files=files))

    def retry(self, index: int) -> None:
        """Drop the reply of a turn and everything after it."""
        del self.turns[index + 1 :]
        self.turns[index].reply = self.turns[index].before = None

    def continue_reply(self) -> None:
        """Prepare to continue the last reply, which was cut short."""
        turn = self.turns[-1]
        turn.before, turn.reply = turn.reply, None
        if turn.before is not None and turn.before.pieces:
            # Half of a character cannot be continued.
            text, drafted = turn.before.pieces[-1]
            turn.before.pieces[-1] = (text.rstrip("\ufffd"), drafted)

    def edit(self, index: int, text: str, files: tuple[File, ...] = ()) -> None:
        """Replace a turn's message and drop everything after it."""
        self.retry(index)
        self.turns[index].user, self.turns[index].files = text, files

    def undo(self) -> Turn:
        """Drop the last turn and return it."""
        return self.turns.pop() if self.turns else Turn("")

    def clear(self) -> None:
        self.turns.clear()

    @property
    def left_out(self) -> LeftOut:
        """How many of the oldest turns prompts leave out. Turns without a reply do not count."""
        for i, turn in enumerate(self.turns):
            if turn.n_ctx:
                return LeftOut(sum(before.has_text for before in self.turns[:i]), turn.n_ctx)
        return LeftOut()

    @left_out.setter
    def left_out(self, left_out: LeftOut) -> None:
        read = [turn for turn in self.turns[:-1] if turn.has_text] + self.turns[-1:]
        for turn in self.turns:
            turn.n_ctx = left_out.n_ctx if turn is read[left_out.n_turns] else 0

    def messages(self, system: str = "") -> tuple[Mapping[str, str], ...]:
        """The conversation for the model, without earlier turns that got no reply."""
        messages = [{"role": "system", "content": system.strip()}] if system.strip() else []
        for turn in self.turns[:-1]:
            if turn.reply is not None and turn.has_text:
                messages.append({"role": "user", "content": turn.said})
                messages.append({"role": "assistant", "content": turn.reply.answer})
        if self.turns:
            messages.append({"role": "user", "content": self.turns[-1].said})
            if self.turns[-1].before is not None:
                messages.append({"role": "assistant", "content": self.turns[-1].before.text})
        return tuple(messages)

    def answer(
        self,
        backend: Backend,
        settings: Settings,
        request_id: str,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> Iterator[None]:
        """Generate the reply to the last turn; yield whenever there is something new to show."""
        turn, left_out = self.turns[-1], self.left_out
        if turn.before is not None:  # a continuation keeps its reply's setting
            settings = replace(settings, thinking=turn.before.thinking)
        request = ChatRequest(
            request_id,
            self.messages(settings.system),
            settings.method,
            settings.sampling,
            settings.max_tokens,
            settings.thinking,
            settings.leave_out,
            left_out,
        )
        before = turn.before or Reply("")
        prefix = list(before.pieces)
        reply = Reply(
            settings.method,
            list(prefix),
            opening=before.opening,
            thinking=settings.thinking,
            n_left_out=left_out.n_turns,
        )
        turn.reply, turn.before = reply, None
        yield

        def take(event: Event) -> None:
            if isinstance(event, LeftOut):
                self.left_out = event
            reply.apply(event)

        yield from follow(backend.reply(request), take, clock)
        done = reply.done
        if reply.error and len(reply.pieces) == len(prefix):
            self.left_out = left_out
        if done is None or done.finish_reason == "cancelled" or not done.n_tokens:
            return
        if _n_timed(done) < LEAST_TIMED:
            return
        read = without_turns(request.messages, reply.n_left_out)
        request = replace(request, messages=tuple(read), leave_out=False, left_out=LeftOut())
        key = _key(request, done)
        if done.method == BASELINE:
            self.plain_runs[key] = PlainRun.of(done, reply.text)
            return
        if settings.compare:
            plain = Reply(BASELINE, list(prefix))

            def apply(event: Event) -> None:
                plain.apply(event)
                n_done = len(plain.pieces) - len(prefix)
                reply.notice = plain.notice or (
                    f"Measuring plain decoding: {n_done} of {done.n_tokens} tokens"
                )

            again = replace(request, method=BASELINE, max_tokens=done.n_tokens)
            yield from follow(backend.reply(again), apply, clock)
            reply.notice = ""
            if plain.done is not None and plain.done.finish_reason != "cancelled":
                self.plain_runs[key] = PlainRun.of(plain.done, plain.text)
        reply.plain = self.plain_runs.get(key)


def follow(
    events: Iterable[Event], apply: Callable[[Event], None], clock: Callable[[], float]
) -> Iterator[None]:
    """Apply each event, and yield when the display should be updated.

    Updates take at most a fifth of the time and come at most 10 times a second.
    """
    due = clock()
    for event in events:
        apply(event)
        now = clock()
        if not isinstance(event, Tokens) or now >= due:
            yield
            shown = clock()
            due = shown + max(INTERVAL, 4 * (shown - now))
    yield


def tokens_per_second(done: Done) -> float:
    """Decoding speed after the first step, which the time to first token covers; 0 if unknown."""
    return _n_timed(done) / done.decode_seconds if done.decode_seconds else 0.0


def _n_timed(done: Done) -> int:
    return done.n_tokens - done.n_first


def waiting_notice(event: Waiting) -> str:
    if event.loading:
        return "Waiting: a model is loading"
    if event.n_ahead == 1:
        return "Waiting: 1 reply is ahead of yours"
    return f"Waiting: {event.n_ahead} replies are ahead of yours"


def stats_line(reply: Reply) -> str:
    """The figures shown below a reply; until it is done, only its token counts."""
    done, parts = reply.done, []
    if done is None:
        if reply.pieces:
            n_drafted = sum(drafted for _, drafted in reply.pieces)
            parts = [f"{len(reply.pieces)} tokens", f"{n_drafted} drafted"]
        return " · ".join(parts)
    if done.n_tokens:
        speed = tokens_per_second(done)
        if speed:
            parts.append(f"{speed:.0f} tok/s" if speed >= 10 else f"{speed:.1f} tok/s")
            if reply.plain is not None and reply.plain.seconds:
                parts.append(_comparison(done, reply.plain, reply.text))
        if done.n_steps:
            parts.append(f"{done.n_tokens / done.n_steps:.1f} tokens per step")
        if done.n_drafted:
            parts.append(f"{100 * done.n_accepted / done.n_drafted:.0f} % accepted")
        parts.append(f"first token {done.prefill_seconds:.2f} s")
    if done.model is not None:
        # The last token of a full context is never decoded, so it has no cell.
        n_used = min(done.n_prompt + done.n_tokens, done.model.n_ctx)
        parts.append(f"context {n_used} / {done.model.n_ctx}")
    if reply.n_left_out:
        parts.append(f"{reply.n_left_out} turn{'' if reply.n_left_out == 1 else 's'} left out")
    end = {"cancelled": "stopped", "length": "length limit", "context": "context full"}
    if done.finish_reason in end:
        parts.append(end[done.finish_reason])
    return " · ".join(parts)


def _comparison(done: Done, plain: PlainRun, text: str) -> str:
    """The speed-up over plain decoding, or why the two runs are too short to compare."""
    n, seconds = _n_timed(done), done.decode_seconds
    least_n, least_seconds = min(n, plain.n_tokens), min(seconds, plain.seconds)
    if least_n < LEAST_COMPARED or least_seconds < LEAST_COMPARED_SECONDS:
        timed = f"{n} tokens in {seconds:.2f} s, plain {plain.n_tokens} in {plain.seconds:.2f} s"
        return f"{timed}: too short to compare"
    same = "same text" if plain.text == text else "different text"
    return f"{tokens_per_second(done) / plain.tokens_per_second:.1f}× plain, {same}"


def markdown(conversation: Conversation) -> str:
    """The conversation as a Markdown document, for export."""
    parts = []
    for turn in conversation.turns:
        parts.append(f"## You\n\n{turn.said}\n")
        reply = turn.shown
        if reply is not None:
            line = " · ".join(filter(None, (reply.model_name, reply.method, stats_line(reply))))
            text = "\n\n".join(filter(None, (_folded(reply), reply.error)))
            parts.append(f"## Model\n\n{text}\n\n<sub>{line}</sub>\n")
    return "\n".join(parts)


def _folded(reply: Reply) -> str:
    """The text in Markdown, with its reasoning in a ``<details>`` element."""
    text, found = reply.text, reply.reasoning
    if found is None:
        return _with_code_closed(text)
    reasoning = _with_code_closed(text[found.start : found.end].strip())
    fold = (
        f"<details><summary>Reasoning</summary>\n\n{reasoning}\n\n</details>" if reasoning else ""
    )
    return "\n\n".join(filter(None, (fold, _with_code_closed(text[found.answer :]))))


def _with_code_closed(text: str) -> str:
    """The text, with its last code block closed if it was cut short there."""
    fence = ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        if found is None:
            continue
        if not fence:
            fence = found[1]
        elif found[1].startswith(fence) and not found[2].strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text


def _key(request: ChatRequest, done: Done) -> str:
    """Identifies a plain run: the model's load, and the request without its method."""
    load = done.model.load if done.model is not None else 0
    asked = (request.messages, dict(request.sampling), request.max_tokens, request.thinking)
    return json.dumps([load, *asked])
