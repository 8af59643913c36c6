"""Replies as jobs of the server: they go on whether or not a page shows them.

A job follows the events of one reply, publishes what changed and saves the text twice a second.
Then it makes the reply's calls of tools that are allowed. It runs in the server's event loop; the
store is used in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from app.api.errors import ApiError
from app.api.log import Call, current_call
from app.mcp.config import ConfigError
from app.mcp.servers import Servers, ToolError
from app.page import outcome, steps
from app.page.feed import Feed
from app.page.prompt import Prompt
from app.page.reply import Reply, ToolCall
from app.page.speeds import Speeds
from app.page.tools import Chosen, chosen_tools, decide, make
from app.page.turns import Shown, reply_fields, while_shown
from app.store import NoSuchChat, Store, StoreError
from app.store.records import State
from app.worker.backend import Backend
from app.worker.events import Events, failed
from app.worker.messages import LAST, ChatRequest, Event, Failed, StepRecord, Steps, Tokens

T = TypeVar("T")
log = logging.getLogger(__name__)

SHOW_SECONDS = 0.1  # between updates; more of them would keep a slow page busy
SAVE_SECONDS = 0.4  # so that a kill loses no more than half a second
CLOSE_SECONDS = 5.0
BUSY = "This chat's last reply is still being written. Wait for its end, or stop it."


@dataclass
class Job:
    """A reply that is being generated, or whose calls are being made.

    request  None: it is written already
    tools    that are added to the request
    allowed  the call that the user has just allowed
    records  its steps so far
    trouble  why it could not be saved; empty if it could
    waiting  for a server of tools, which ``stop`` ends
    """

    owner: str
    store: Store
    chat: str
    turn: int
    reply: Reply
    prompt: Prompt
    request: ChatRequest | None
    tools: Chosen = field(default_factory=dict)
    allowed: ToolCall | None = None
    events: Events | None = None
    call: Call = field(default_factory=Call)
    waiting: asyncio.Future[Any] | None = None
    is_stopped: bool = False
    records: list[StepRecord] = field(default_factory=list)
    shown: Shown = field(default_factory=Shown)
    trouble: str = ""
    is_over: bool = False
    has_unsaved: bool = False
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._begins_at = len(self.reply.text)
        self._n_left_out = self.reply.n_left_out
        self.is_over = self.request is None
        self._pace = outcome.Pace()
        self._last = ""  # the token before the next step

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns. Raises CancelledError if the user stops it."""
        self.waiting = waiting = asyncio.ensure_future(work)
        try:
            return await waiting
        finally:
            self.waiting = None

    def stop(self) -> None:
        self.is_stopped = True
        if self.waiting is not None:
            self.waiting.cancel()
        elif self.events is not None:
            self.events.close()

    def take(self, event: Event) -> None:
        """Update the reply; the event may be the last one."""
        if self.is_over:
            return
        self.call.take(event)
        if isinstance(event, Steps):
            for record in event.records:
                self._note(record)
            return
        self.reply.take(event)
        if isinstance(event, Failed) and len(self.reply.text) == self._begins_at:
            self.reply.n_left_out = self._n_left_out  # no prompt was read
        self.reply.reads_from = self.prompt.first_read(self.reply.n_left_out)
        self.is_over = isinstance(event, LAST)
        if isinstance(event, Tokens):
            self.has_unsaved = True
            self.reply.sentence = self._pace.take(event)
        self.changed.set()

    def _note(self, record: StepRecord) -> None:
        """Keep a step, and where its drafts came from."""
        verbs = outcome.verbs(record, self._last, self.prompt.said, self.prompt.files)
        if verbs:
            self.reply.marks.sources.append(Counter(verbs).most_common(1)[0][0])
        self._last = outcome.last_token(record, self._last)
        self.records.append(record)

    @property
    def head(self) -> dict[str, Any]:
        """Fields that change before there is text."""
        reply = self.reply
        return {"notice": reply.notice, "reads_from": reply.reads_from, "n_ctx": reply.n_ctx}

    def as_json(self) -> dict[str, Any]:
        """Fields of the turn, as they were published last."""
        return {**self.fields("running"), **self.shown.blocks()}

    def fields(self, state: str) -> dict[str, Any]:
        """Fields of the turn beside its blocks."""
        found = reply_fields(self.reply, state)
        return {**found, "error": self.trouble} if self.trouble else found


class Jobs:
    """The running replies, at most one a chat."""

    def __init__(
        self,
        backend: Backend,
        feed: Feed,
        on_end: Callable[[Job], Awaitable[None]],
        speeds: Speeds,
        servers: Servers,
    ) -> None:
        """``on_end`` is called when a reply has ended and is saved; ``speeds`` learn from it."""
        self._servers = servers
        self._backend = backend
        self._feed = feed
        self._on_end = on_end
        self._speeds = speeds
        self._jobs: dict[str, Job] = {}  # by chat
        self._reserved: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def running(self, chat: str) -> int | None:
        """The turn that is being generated in a chat."""
        return self._jobs[chat].turn if chat in self._jobs else None

    def shown(self, chat: str) -> dict[int, dict[str, Any]]:
        """What is shown now of the turn that is being generated, by its id."""
        job = self._jobs.get(chat)
        return {} if job is None else {job.turn: job.as_json()}

    @contextmanager
    def reserved(self, chat: str) -> Iterator[None]:
        """Nobody else starts a reply in this chat, or changes its turns. Raises ApiError (409) if
        somebody does."""
        if chat in self._jobs or chat in self._reserved:
            raise ApiError(BUSY, 409)
        self._reserved.add(chat)
        try:
            yield
        finally:
            self._reserved.discard(chat)

    def start(self, job: Job) -> None:
        self._loop, job.call = asyncio.get_running_loop(), current_call()
        if not job.call.choices:  # else it goes on, after calls of tools
            job.call.writes(self._backend.status().model, job.owner, "chat")
        if job.request is not None and not job.tools:
            self._ask(job, job.request)
        self._jobs[job.chat] = job
        task = asyncio.ensure_future(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ask(self, job: Job, request: ChatRequest) -> None:
        try:
            if request.memory is None:  # of an incognito chat
                job.call.texts = None
            job.events = self._backend.reply(job.call.asked(request))
        except Exception as error:  # the turn is there already, and says why it has no text
            log.exception("a reply could not be asked for")
            job.events = failed(f"Unexpected {type(error).__name__}: {error}", "error")

    def stop(self, turn: int | None) -> None:
        """Stop the reply ``turn``, if it is being generated, or its calls are being made."""
        for job in self._jobs.values():
            if job.turn == turn:
                job.stop()

    def close(self) -> None:
        """Save the running replies as interrupted. Called at the server's end, from another
        thread."""
        if self._loop is not None:
            closing = asyncio.run_coroutine_threadsafe(self._interrupt(), self._loop)
            try:
                closing.result(CLOSE_SECONDS)
            except FutureTimeout:
                log.error("the running replies could not be saved in time")

    async def _interrupt(self) -> None:
        self._is_closed = True
        for job in list(self._jobs.values()):
            is_done = job.is_over and job.waiting is None
            await self._save(job, "done" if is_done else "interrupted", is_last=True)

    async def _run(self, job: Job) -> None:
        try:
            if job.request is not None:
                await self._write(job)
            await self._call(job)
        finally:
            del self._jobs[job.chat]
        if not self._is_closed:
            await self._on_end(job)
            self._publish(job, {"set": job.fields("done")})
        if all(other.call is not job.call for other in self._jobs.values()):
            job.call.close()

    async def _write(self, job: Job) -> None:
        saving = asyncio.ensure_future(self._keep_saving(job))
        try:
            if job.tools:
                await self._give_tools(job)
            await self._follow(job)
        except Exception as error:
            log.exception("a reply's job failed")
            job.reply.error = f"Unexpected {type(error).__name__}: {error}"
        job.is_over = True
        await self._finish(job)
        await saving

    async def _give_tools(self, job: Job) -> None:
        """Ask for the reply with the tools of the chat, whose servers are started."""
        assert job.request is not None
        job.reply.notice = f"Starting the tools of {', '.join(job.tools)}"
        self._publish(job, {"set": job.head})
        try:
            tools = await job.wait(chosen_tools(self._servers, job.tools))
        except (ConfigError, ToolError) as error:
            job.take(Failed(str(error)))
            return
        except asyncio.CancelledError:
            job.take(Failed("Stopped before the tools were there."))
            return
        job.request = replace(job.request, tools=tuple(tool.as_function() for tool in tools))
        job.reply.tools = tools
        self._ask(job, job.request)

    async def _call(self, job: Job) -> None:
        """Make the calls that are allowed, one after the other."""
        answers: Mapping[str, bool] = {}
        if job.reply.calls:
            with suppress(StoreError):
                answers = await job.store.transaction(lambda s: s.answers(job.chat, job.owner))
        for call in job.reply.calls:
            if job.is_stopped or self._is_closed:
                break
            if not decide(call, answers) and call is not job.allowed:
                continue
            call.state = "running"
            await self._save(job, "running")
            self._publish(job, {"set": job.fields("running")})
            try:
                await job.wait(make(self._servers, call, job.reply))
            except asyncio.CancelledError:
                call.state = "stopped"
            except Exception as error:
                log.exception("a call failed")
                call.state, call.is_error = "done", True
                call.result = f"Unexpected {type(error).__name__}: {error}"
        if job.reply.calls:
            await self._save_at_last(job)

    async def _follow(self, job: Job) -> None:
        """Show the reply until it ends."""
        clock = asyncio.get_running_loop().time
        if job.events is not None:
            job.events.hand_over(job.take)
        try:
            head, is_over = job.head, False
            while not is_over:
                await job.changed.wait()
                job.changed.clear()
                began, is_over = clock(), job.is_over
                if job.head != head:
                    head = job.head
                    self._publish(job, {"set": head})
                show = partial(job.shown.update, job.reply, is_over=is_over)
                for change in await while_shown(show):
                    self._publish(job, {**change, "sentence": job.reply.sentence})
                if not is_over:  # showing takes at most a fifth of the time
                    await asyncio.sleep(max(SHOW_SECONDS, 4 * (clock() - began)))
        finally:
            if job.events is not None:
                job.events.close()

    async def _finish(self, job: Job) -> None:
        """Say what came of the reply, and save it, however long that takes."""
        kept_steps = b""
        try:
            kept_steps = await while_shown(partial(self._summed_up, job))
        except Exception:  # nothing keeps the text from being saved
            log.exception("a reply cannot be summed up")
        await self._save_at_last(job)
        if kept_steps and not self._is_closed:
            with suppress(StoreError):  # the text is kept, and that is what counts
                await job.store.transaction(lambda store: store.save_steps(job.turn, kept_steps))

    async def _save_at_last(self, job: Job) -> None:
        while not (await self._save(job, "done") or self._is_closed):
            await asyncio.sleep(SAVE_SECONDS)

    def _summed_up(self, job: Job) -> bytes:
        """Say in the reply what came of its drafts; returns its steps as they are kept."""
        reply, done = job.reply, job.reply.done
        if done is None or job.request is None:
            return b""
        if all(step.n_texts == 1 for step in job.records):
            self._speeds.take(done)
        said = job.prompt.said, job.prompt.files
        found = outcome.outcome(done, job.records, *said, reply.n_left_out, job.request.sampling)
        reply.sentence, reply.figures = found.sentence, [list(one) for one in found.figures]
        reply.cells = steps.cells(job.records)
        return steps.pack(job.records, done.method) if job.records else b""

    async def _keep_saving(self, job: Job) -> None:
        while not job.is_over:
            await asyncio.sleep(SAVE_SECONDS)
            if not job.is_over and job.has_unsaved:
                await self._save(job, "running")

    async def _save(self, job: Job, state: State, *, is_last: bool = False) -> bool:
        """Save the reply, or say in it why that is not possible; returns whether it was saved."""
        async with job.saving:  # so that no older save comes after a newer one
            if self._is_closed and not is_last:
                return True
            job.has_unsaved, trouble = False, ""
            kept = job.reply.text, job.reply.as_json(), state
            try:
                await job.store.transaction(lambda store: store.save_reply(job.turn, *kept))
            except NoSuchChat:
                log.warning("turn %d was deleted while it was written", job.turn)
            except StoreError as error:
                job.has_unsaved, trouble = True, str(error)
            if trouble != job.trouble:
                job.trouble = trouble
                self._publish(job, {"set": {"error": trouble}})
            return not trouble

    def _publish(self, job: Job, change: Mapping[str, Any]) -> None:
        self._feed.publish(job.owner, "turn", {"chat": job.chat, "turn": job.turn, **change})
