"""What the server knows of one tab of the page, and the turns as the tab shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.page.conversation import Conversation, Reply, Turn
from app.page.keep import from_text, tail_to_text, to_text
from app.page.render import GrowingReply, turn_html


@dataclass
class Session:
    """What one tab has: its conversation, and what it waits for.

    knows     whether it is this side's to say what the conversation is, not the browser's
    busy      whether a reply is due
    stops     whether it is to stop
    ends      whether the conversation is to end with it
    ended_at  when the user last began another, by the page's clock
    """

    conversation: Conversation = field(default_factory=Conversation)
    knows: bool = False
    busy: bool = False
    stops: bool = False
    ends: bool = False
    ended_at: float = 0.0
    _n_kept: int = 0  # tokens of the last reply
    _growing: tuple[Reply | None, GrowingReply | None] = (None, None)
    _finished: list[tuple[Reply | None, tuple[Any, ...], str]] = field(default_factory=list)

    def html(self) -> list[str]:
        """The turns; those that are finished are rendered once, as a long chat has many."""
        turns = self.conversation.turns
        del self._finished[len(turns) :]
        names = {turn.reply.model_name for turn in turns if turn.reply is not None}
        with_model = len(names - {""}) > 1
        return [self._turn_html(index, turn, with_model) for index, turn in enumerate(turns)]

    def kept(self) -> str:
        """The conversation, for the browser to keep."""
        turns = self.conversation.turns
        reply = turns[-1].shown if turns else None
        self._n_kept = len(reply.pieces) if reply is not None else 0
        return to_text(self.conversation)

    def tail(self) -> str:
        """The tokens of the reply that were not there at the last ``kept``, for the browser too."""
        return tail_to_text(self.conversation, self._n_kept)

    def revive(self, kept: str) -> None:
        """Take over what the browser kept, where this side knows of nothing: it was started anew,
        or the page was."""
        if not self.knows:
            self.conversation = from_text(kept)
        self.knows = True

    def is_open(self, at: float) -> bool:
        """Whether something that the user did at this time can still be taken."""
        return not self.busy and at >= self.ended_at

    @property
    def begun(self) -> bool:
        """Whether the last turn's reply has begun."""
        turns = self.conversation.turns
        return bool(turns) and turns[-1].reply is not None

    def end(self) -> None:
        """Begin another conversation."""
        self.knows, self.busy, self.ends = True, False, False
        self.conversation.clear()

    def _turn_html(self, index: int, turn: Turn, with_model: bool) -> str:
        last = index == len(self.conversation.turns) - 1
        if self.busy and last:
            del self._finished[index:]
            return turn_html(turn, live=True, last=True, growing=self._growing_of(turn.reply))
        key = (turn.user, turn.files, turn.n_ctx, last, with_model)
        if index < len(self._finished):
            reply, known, html = self._finished[index]
            if reply is turn.reply and known == key:
                return html
        html = turn_html(turn, live=False, last=last, with_model=with_model)
        self._finished[index : index + 1] = [(turn.reply, key, html)]
        return html

    def _growing_of(self, reply: Reply | None) -> GrowingReply | None:
        """What was rendered of a reply, unless it is whole."""
        if reply is None or reply.done is not None or reply.error:
            return None
        if self._growing[0] is not reply:
            self._growing = (reply, GrowingReply())
        return self._growing[1]
