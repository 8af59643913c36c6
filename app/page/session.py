"""The server's state of one browser tab: its conversation, pending reply and rendered turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.page.conversation import Conversation, Reply, Turn
from app.page.render import GrowingReply, turn_html
from app.page.saved import from_text, tail_to_text, to_text


@dataclass
class Session:
    """One tab's conversation and its pending reply.

    is_restored  whether the conversation was taken over from the browser, or started here
    busy         whether a reply is pending
    stopping     whether that reply should stop
    ending       whether the conversation ends with that reply
    ended_at     when the user last clicked New chat, by the page's clock
    """

    conversation: Conversation = field(default_factory=Conversation)
    is_restored: bool = False
    busy: bool = False
    stopping: bool = False
    ending: bool = False
    ended_at: float = 0.0
    _n_saved: int = 0  # tokens of the last reply
    _growing: tuple[Reply | None, GrowingReply | None] = (None, None)
    _finished: list[tuple[Reply | None, tuple[Any, ...], str]] = field(default_factory=list)

    def html(self) -> list[str]:
        """The turns as HTML. Finished turns are rendered only once."""
        turns = self.conversation.turns
        del self._finished[len(turns) :]
        names = {turn.reply.model_name for turn in turns if turn.reply is not None}
        with_model = len(names - {""}) > 1
        return [self._turn_html(index, turn, with_model) for index, turn in enumerate(turns)]

    def saved(self) -> str:
        """The conversation as JSON, for the browser to save."""
        turns = self.conversation.turns
        reply = turns[-1].shown if turns else None
        self._n_saved = len(reply.pieces) if reply is not None else 0
        return to_text(self.conversation)

    def tail(self) -> str:
        """The reply's tokens since the last call of ``saved``, as JSON for the browser."""
        return tail_to_text(self.conversation, self._n_saved)

    def restore(self, saved: str) -> None:
        """Take over the browser's conversation after a restart of the server or a page reload."""
        if not self.is_restored:
            self.conversation = from_text(saved)
        self.is_restored = True

    def accepts(self, at: float) -> bool:
        """Whether an action of the user at this time still applies."""
        return not self.busy and at >= self.ended_at

    @property
    def has_started(self) -> bool:
        """Whether the last turn's reply has started."""
        turns = self.conversation.turns
        return bool(turns) and turns[-1].reply is not None

    def end(self) -> None:
        """Start a new conversation."""
        self.is_restored, self.busy, self.ending = True, False, False
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
        """The rendering state of a reply; None once it is finished."""
        if reply is None or reply.done is not None or reply.error:
            return None
        if self._growing[0] is not reply:
            self._growing = (reply, GrowingReply())
        return self._growing[1]
