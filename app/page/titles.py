"""Titles of chats, which the model writes after the first reply while it has nothing else to do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from app.page.jobs import Job
from app.page.reply import Reply
from app.worker.backend import Backend
from app.worker.messages import ChatRequest
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
        self._wanted: dict[str, asyncio.Task[None]] = {}  # by chat
        self._place = asyncio.Lock()

    def want(self, job: Job, take: Callable[[Job, str], Awaitable[None]]) -> None:
        """Write a title if this was a chat's first reply; ``take`` gets it, if it is a good one."""
        is_first = len(job.prompt.starts) == 1 and job.chat not in self._wanted
        is_able = self._backend.status().facts.n_params >= LEAST_PARAMS
        if is_first and is_able and job.reply.done is not None and job.reply.answer.strip():
            self._wanted[job.chat] = asyncio.ensure_future(self._write(job, take))

    async def _write(self, job: Job, take: Callable[[Job, str], Awaitable[None]]) -> None:
        said = f"User: {job.prompt.said[:READ]}\n\nModel: {job.reply.answer[:READ]}"
        async with self._place:
            for _ in range(MOST_TRIES):
                n_looks = 0
                while n_looks < IDLE_SECONDS / LOOK_SECONDS:
                    await asyncio.sleep(LOOK_SECONDS)
                    n_looks = 0 if self._n_running() else n_looks + 1
                reply = await self._reply(ASKED + said)
                if reply.done is not None or reply.error:
                    if title := title_in(reply):
                        await take(job, title)
                    return

    def _n_running(self) -> int:
        """How much wants the model."""
        report = self._backend.report()
        is_loading = self._backend.status().loading is not None
        return len(report.running) + report.n_waiting + is_loading

    async def _reply(self, text: str) -> Reply:
        """The model's reply; without an end if something else came."""
        reply = Reply()
        limits: dict[str, Any] = {"max_tokens": MOST_TOKENS, "memory": None, "on_disk": False}
        messages = ({"role": "user", "content": text},)
        request = ChatRequest(uuid4().hex, messages, BASELINE, thinking=False, **limits)
        events = self._backend.reply(request)
        events.hand_over(reply.take)
        while reply.done is None and not reply.error and self._n_running() <= 1:  # its own
            await asyncio.sleep(LOOK_SECONDS)
        events.close()
        return reply


def title_in(reply: Reply) -> str:
    """The title that the model wrote; empty if it is not a good one."""
    lines = reply.answer.strip().splitlines()
    is_whole = reply.done is not None and reply.done.finish_reason == "stop"
    title = re.sub(r"(?i)^title\s*:", "", lines[0].strip(_MARKS)).strip(_MARKS) if lines else ""
    is_good = len(lines) == 1 and 2 <= len(title) <= MOST_CHARACTERS
    return title if is_whole and is_good and not re.search("<|```", lines[0]) else ""
