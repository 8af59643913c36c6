"""A reply: what its events made of it, with its calls of tools, and how it is kept as JSON.

Knows the backend's messages, but nothing of HTML, HTTP or the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from app.mcp.servers import Offer
from app.page.markdown import Marks
from app.worker.messages import Done, Event, Failed, LeftOut, Opening, Prefill, Tokens, Waiting
from speculation.chat.reasoning import LONGEST_MARK, ReasoningSpan, answer_of, find_reasoning
from speculation.chat.reply_parser import CallArguments, CallStart, Delta, ReplyParser
from speculation.registry.entries import title_of

log = logging.getLogger(__name__)
_CUT_SHORT = ("cancelled", "length", "context")


_Pair = Field(min_length=2, max_length=2)


@dataclass
class ToolCall:
    """A call of a tool.

    name       as the model wrote it
    arguments  JSON
    server, tool  what it calls, as the server names it; empty if no tool has the name
    state      "asked": the user has not answered yet; "repeated": it was made just before
    result     for the model; empty if there is none
    """

    name: str
    arguments: str = ""
    server: str = ""
    tool: str = ""
    state: Literal["asked", "running", "done", "denied", "stopped", "repeated"] = "asked"
    result: str = ""
    is_error: bool = False

    @property
    def waits(self) -> bool:
        """Whether the user may answer it, unless it is running now."""
        return self.state in ("asked", "running", "stopped")

    def repeats(self, earlier: Sequence[ToolCall]) -> bool:
        """Whether one of the calls was the same, and has not failed."""
        asked = self.name, _object(self.arguments)
        made = [one for one in earlier if one.state != "stopped" and not one.is_error]
        return any((one.name, _object(one.arguments)) == asked for one in made)

    def as_json(self, *, is_running: bool) -> dict[str, Any]:
        """The call as it is shown."""
        state = "interrupted" if self.state == "running" and not is_running else self.state
        return {**vars(self), "state": state, "waits": self.waits and not is_running}


@dataclass
class Kept:
    """What is kept of a reply beside its text.

    runs, sources  of its text, as in ``Marks``
    opening    the mark that opens the reasoning, if the prompt contains it instead of the reply
    thinking   whether the model was told to reason
    seconds_thinking  how long it has reasoned
    n_left_out  how many earlier turns the prompt left out, for a context of ``n_ctx`` tokens
    reads_from  the turn that the prompt began with, if it left some out
    sentence, figures, cells  what is said of its drafts below it (``outcome``), and its steps' bar
    calls      with which it ended; the text ends before them
    """

    method: str = ""
    model: str = ""
    n_ctx: NonNegativeInt = 0
    runs: list[Annotated[list[NonNegativeInt], _Pair]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    opening: str = ""
    thinking: bool | None = None
    seconds_thinking: FiniteFloat = 0.0
    error: str = ""
    n_left_out: NonNegativeInt = 0
    reads_from: int | None = None
    sentence: str = ""
    figures: list[Annotated[list[str], _Pair]] = field(default_factory=list)
    cells: list[Annotated[list[FiniteFloat], _Pair]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    done: Done | None = None


_KEPT = TypeAdapter(Kept)


@dataclass
class Reply(Kept):
    """A reply, finished or still being generated. ``notice`` is progress to show before there is
    text, ``tools`` are those that it may call, ``earlier`` the calls whose results it has read."""

    text: str = ""
    notice: str = ""
    tools: Sequence[Offer] = ()
    earlier: Sequence[ToolCall] = ()
    marks: Marks = field(default_factory=Marks)
    _thinks_since: float | None = None
    _parser: ReplyParser | None = None
    _begun: list[ToolCall] = field(default_factory=list)  # those that it has written so far

    @property
    def end(self) -> int:
        """Where the text ends that is no call, and cannot become one."""
        if self._parser is None:
            return len(self.text)
        at = self._parser.call_at
        return max(0, self._parser.n_read) if at is None else at

    @property
    def reasoning(self) -> ReasoningSpan | None:
        """The reasoning's place in the text."""
        return find_reasoning(self.text, self.opening)

    @property
    def answer(self) -> str:
        """The text without its reasoning; all of the text until the reasoning has ended."""
        return answer_of(self.text, self.opening)

    @property
    def n_context(self) -> int:
        """How many tokens of the context it has filled, with its prompt; 0 if unknown."""
        # The last token of a full context is never decoded, so it has no cell.
        return min(self.done.n_prompt + self.done.n_tokens, self.n_ctx) if self.done else 0

    @property
    def is_cut_short(self) -> bool:
        """Whether the user, a limit or an error ended it, so that it can be continued."""
        ended = self.done.finish_reason if self.done is not None else ""
        return bool(self.text) and (ended in _CUT_SHORT or bool(self.error))

    def begin_again(self, method: str) -> None:
        """Prepare to be continued."""
        half = len(self.text) - len(self.text.rstrip("\ufffd"))
        if half:  # half of a character cannot be continued
            self.text = self.text[:-half]
            self.marks = Marks.of(self.marks.runs, len(self.text), self.marks.sources)
        del self.marks.sources[len(self.marks.runs) // 2 :]  # of steps whose tokens did not come
        self.method, self.done, self.error = method, None, ""
        self.sentence, self.figures, self.cells = "", [], []

    def take(self, event: Event) -> None:
        """Update the reply from an event of the backend."""
        if isinstance(event, Tokens):
            self.notice = ""
            may_think = self._thinks_since is not None or len(self.text) <= LONGEST_MARK
            self.text += "".join(text for text, _ in event.pieces)
            for text, is_drafted in event.pieces:
                self.marks.add(len(text), is_drafted)
            if may_think:
                self._time_reasoning()
            if self._parser is not None:
                self._read_calls(self._parser.feed("".join(text for text, _ in event.pieces)))
        elif isinstance(event, Waiting):
            self.notice = waiting_notice(event)
        elif isinstance(event, LeftOut):
            self.n_left_out, self.n_ctx = event.n_turns, event.n_ctx or self.n_ctx
        elif isinstance(event, Prefill):
            self.notice = f"Reading the prompt: {event.done} of {event.total} tokens"
        elif isinstance(event, Opening):
            if not self.text:  # a continued reply already has its opening
                self.opening = event.mark
            if self.tools:
                functions = [tool.as_function() for tool in self.tools]
                self._parser = ReplyParser(event.calls, self.opening, functions)
                self._read_calls(self._parser.feed(self.text))
        elif isinstance(event, Done):
            self.notice, self.done = "", replace(event, prompt="")
            self._end_calls()
            if event.model is not None:
                self.model = title_of(event.model.spec.model)
                self.n_ctx = self.n_ctx if self.n_left_out else event.model.n_ctx
            self._thinks_since = None
        elif isinstance(event, Failed):
            self.notice, self.error = "", event.message

    def _read_calls(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, CallStart):
                self._begun.append(ToolCall(delta.name))
                self.notice = f"Calling {delta.name}"
            elif isinstance(delta, CallArguments):
                self._begun[-1].arguments += delta.text

    def _end_calls(self) -> None:
        """Take the calls out of the text, unless the reply ended within one."""
        parser, self._parser = self._parser, None
        if parser is None or self.done is None or self.done.finish_reason != "stop":
            return
        self._read_calls(parser.finish())
        self.notice = ""
        if parser.call_at is None or parser.in_call:
            return
        self.text = self.text[: parser.call_at].rstrip()
        self.marks = Marks.of(self.marks.runs, len(self.text))
        self.calls, tools = self._begun, {tool.name: tool for tool in self.tools}
        for call in self.calls:
            if tool := tools.get(call.name):
                call.server, call.tool = tool.server, tool.own
            if tool is None:
                self._refuse(call, f"There is no tool {call.name}; call one of {', '.join(tools)}.")
            elif _object(call.arguments) is None:
                self._refuse(call, "The arguments are no JSON object.")
            elif call.repeats(self.earlier):
                call.state = "repeated"

    def _refuse(self, call: ToolCall, why: str) -> None:
        call.state, call.result, call.is_error = "done", why, True

    def _time_reasoning(self) -> None:
        now, found = monotonic(), self.reasoning
        if self._thinks_since is not None:
            self.seconds_thinking += now - self._thinks_since
        is_thinking = found is not None and found.end == len(self.text)
        self._thinks_since = now if is_thinking else None

    def as_json(self) -> dict[str, Any]:
        """What ``from_json`` reads, without the text."""
        kept = {one.name: getattr(self, one.name) for one in fields(Kept)}
        kept["runs"] = [list(run) for run in self.marks.runs]
        kept["sources"] = list(self.marks.sources)
        kept["seconds_thinking"] = round(self.seconds_thinking, 1)
        kept["calls"] = [vars(call) for call in self.calls]
        if self.done is not None:
            kept["done"] = vars(replace(self.done, model=None, decode_ms=()))
        return kept

    @classmethod
    def from_json(cls, text: str, kept: Mapping[str, Any]) -> Reply:
        """The reply that was kept; its text alone if the rest cannot be read: an import or a newer
        version may have written it."""
        try:
            found = _KEPT.validate_python(kept)
        except ValidationError as error:
            log.warning("ignoring what was kept of a reply beside its text: %s", error)
            found = Kept()
        runs, found.runs = found.runs, []
        sources, found.sources = found.sources, []
        if sum(n_characters for n_characters, _ in runs) != len(text):
            runs = []
        return cls(**vars(found), text=text, marks=Marks.of(runs, len(text), sources))


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object; None if it is none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def waiting_notice(event: Waiting) -> str:
    ahead = "1 reply is" if event.n_ahead == 1 else f"{event.n_ahead} replies are"
    return f"Waiting: {'a model is loading' if event.loading else f'{ahead} ahead of yours'}"
