"""What the model reads: the turns of a chat's path as messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.page.reply import Reply
from app.store import Turn
from app.store.exports import quoted
from app.worker.messages import LeftOut
from speculation.chat.reasoning import answer_of

NOT_MADE = {
    "denied": "The user does not allow this call.",
    "stopped": "The user stopped this call.",
    "repeated": "This call was made just before: its result is above.",
}


@dataclass(frozen=True)
class Prompt:
    """The messages, and the turns of the chat that a prompt may begin with.

    starts  a turn for each that ``LeftOut`` counts
    files   the texts of the files
    """

    messages: tuple[Mapping[str, Any], ...]
    starts: tuple[int, ...]
    files: str = ""

    @property
    def said(self) -> str:
        """The last message of the user."""
        said = [one["content"] for one in self.messages if one["role"] == "user"]
        return str(said[-1]) if said else ""

    def left_out(self, reads_from: int | None, n_ctx: int) -> LeftOut:
        """What is left out so that the prompt begins with this turn; nothing if it is unknown."""
        if reads_from not in self.starts:
            return LeftOut()
        return LeftOut(self.starts.index(reads_from), n_ctx)

    def first_read(self, n_left_out: int) -> int | None:
        """The turn that the prompt begins with; None if it leaves nothing out."""
        return self.starts[n_left_out] if n_left_out else None


def prompt_of(path: Sequence[Turn], system: str = "") -> Prompt:
    """The messages of a path, which ends with a message, with a reply to continue, or with the
    results of calls.

    Without reasoning, and without earlier messages that got no reply.
    """
    told = system.strip()
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": told}] if told else []
    starts: list[int] = []
    waiting: Turn | None = None
    for turn in path:
        is_last = turn is path[-1]
        if turn.role == "user":
            waiting = turn
            if not is_last:
                continue
        elif not (turn.text or turn.reply.get("calls") or is_last):
            continue
        if waiting is not None:
            starts.append(waiting.id)
            content = with_files(waiting.text, waiting.files)
            messages.append({"role": "user", "content": content})
            waiting = None
        if turn.role == "assistant":
            if not starts:  # a greeting
                starts.append(turn.id)
            opening = str(turn.reply.get("opening", ""))
            if turn.reply.get("calls"):
                messages += _with_results(turn, answer_of(turn.text, opening))
                continue
            text = opening + turn.text if is_last else answer_of(turn.text, opening)
            messages.append({"role": "assistant", "content": text})
    files = "\n".join(file["text"] for turn in path for file in turn.files)
    return Prompt(tuple(messages), tuple(starts), files)


def _with_results(turn: Turn, text: str) -> list[Mapping[str, Any]]:
    """A reply that ended with calls, and what came of them; nothing if it repeated others: a small
    model would go on with that."""
    calls, results = [], []
    made = Reply.from_json("", turn.reply).calls
    if made and all(call.state == "repeated" for call in made):
        return []
    for number, call in enumerate(made):
        id_ = f"call_{turn.id}_{number}"
        function = {"name": call.name, "arguments": call.arguments}
        calls.append({"id": id_, "type": "function", "function": function})
        result = call.result or NOT_MADE.get(call.state, "This call was not made.")
        results.append({"role": "tool", "tool_call_id": id_, "content": result})
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *results]


def with_files(text: str, files: Sequence[Mapping[str, Any]]) -> str:
    """The message as the model reads it: its text, and each file as a code block. One that
    ``leads`` comes before the text."""
    before = [quoted(file["name"], file["text"]) for file in files if file.get("leads", True)]
    after = [quoted(file["name"], file["text"]) for file in files if not file.get("leads", True)]
    return "\n\n".join(filter(None, [*before, text, *after])).strip("\n") if files else text
