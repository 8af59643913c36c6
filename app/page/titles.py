"""Titles of chats, which the model writes after the first reply while it has nothing else to do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from app.page.jobs import Job
from app.worker.backend import Backend
from app.worker.messages import LAST, ChatRequest, Done, Tokens
from speculation.chat.reasoning import answer_of
from speculation.drafter import BASELINE

LEAST_PARAMS = 10**8  # of the model; smaller ones write no titles worth reading
MOST_TOKENS, MOST_CHARACTERS, MOST_TRIES = 24, 60, 5
READ = 600  # characters of the message, and of the reply
IDLE_SECONDS = 1.0  # so long nothing may run before
LOOK_SECONDS = 0.1  # between looks at whether something else runs
ASKED = "Write a title for this chat in its language: two to six words, nothing else.\n\n"
_MARKS = " \t*#_`\"'“”„«».:"


class Titles:
    """One is written at a time, with the lowest priority: what else comes ends it, and it begins
    anew later."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tasks: set[asyncio.Task[None]] = set()
        self._place = asyncio.Lock()
        self._wanted: set[str] = set()  # chats

    def want(self, job: Job, take: Callable[[Job, str], Awaitable[None]]) -> None:
        """Write a title if this was a chat's first reply; ``take`` gets it, if it is a good one."""
        is_first = len(job.prompt.starts) == 1 and job.chat not in self._wanted
        is_able = self._backend.status().facts.n_params >= LEAST_PARAMS
        if is_first and is_able and job.reply.done is not None and job.reply.answer.strip():
            self._wanted.add(job.chat)
            task = asyncio.ensure_future(self._write(job, take))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write(self, job: Job, take: Callable[[Job, str], Awaitable[None]]) -> None:
        said, answer = job.prompt.said[:READ], job.reply.answer[:READ]
        messages = ({"role": "user", "content": f"{ASKED}User: {said}\n\nModel: {answer}"},)
        async with self._place:
            for _ in range(MOST_TRIES):
                await self._idle()
                text = await self._reply(
                    ChatRequest(
                        uuid4().hex,
                        messages,
                        BASELINE,
                        max_tokens=MOST_TOKENS,
                        thinking=False,
                        memory=None,
                        on_disk=False,
                    )
                )
                if text is not None:
                    if title := title_in(text):
                        await take(job, title)
                    return

    async def _idle(self) -> None:
        """Wait until nothing runs."""
        n_looks = 0
        while n_looks < IDLE_SECONDS / LOOK_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            n_looks = 0 if self._others() else n_looks + 1

    def _others(self, own: str = "") -> bool:
        """Whether something else wants the model."""
        report, status = self._backend.report(), self._backend.status()
        is_own = own not in report.running  # it may be the one that waits
        n_others = report.n_waiting - is_own if own else report.n_waiting
        return bool({*report.running} - {own}) or n_others > 0 or status.loading is not None

    async def _reply(self, request: ChatRequest) -> str | None:
        """The reply's text; None if something else came."""
        texts: list[str] = []
        last: list[Any] = []

        def take(event: Any) -> None:
            if isinstance(event, Tokens):
                texts.extend(text for text, _ in event.pieces)
            elif event is None or isinstance(event, (*LAST, Exception)):
                last.append(event)

        events = self._backend.reply(request)
        events.hand_over(take)
        try:
            while not last:
                await asyncio.sleep(LOOK_SECONDS)
                if not last and self._others(request.id):
                    return None
        finally:
            events.close()
        is_whole = isinstance(last[0], Done) and last[0].finish_reason == "stop"
        return "".join(texts) if is_whole else ""


def title_in(text: str) -> str:
    """The title in what the model wrote; empty if there is no good one.

    >>> title_in('**Title: "Rivers of Europe".**'), title_in("a " * 40)
    ('Rivers of Europe', '')
    """
    lines = answer_of(text).strip().splitlines()
    title = re.sub(r"(?i)^title\s*:", "", lines[0].strip(_MARKS)).strip(_MARKS) if lines else ""
    is_good = len(lines) == 1 and 2 <= len(title) <= MOST_CHARACTERS and "<" not in title
    return title if is_good else ""
