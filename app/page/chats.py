"""The chats of the page: what the routes do, for their owners, and what the stream tells of it.

Knows the store, the jobs and the backend, but nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from app.api.errors import ApiError
from app.page.feed import Feed
from app.page.jobs import Job, Jobs
from app.page.prompt import Prompt, prompt_of
from app.page.races import Races
from app.page.reply import Reply
from app.page.settings import InvalidSetting, Settings, read_settings
from app.page.speeds import Speeds
from app.page.turns import Mark, chat_json, reply_fields, turn_json
from app.store import Chat, NoSuchChat, Store, StoreError, Turn, default_file
from app.worker.backend import Backend
from app.worker.messages import ChatRequest, LeftOut

T = TypeVar("T")
Json = dict[str, Any]
FIRST_INCOGNITO = 2**40  # the least id of a turn that is only in memory
EMPTY = "the message is empty; give a text or a file"
NOTHING = LeftOut()
MOST_TURNS = 30  # that are sent at once


@dataclass(frozen=True)
class Ask:
    """What a new reply is asked for with.

    settings  as JSON; None: the chat's
    memory    as in ``ChatRequest``
    """

    settings: Mapping[str, Any] | None = None
    memory: str = ""


class _Started(NamedTuple):
    job: Job
    turns: list[Json]
    chat: Chat
    mark: Mark  # before


class Chats:
    """All chats of all owners.

    kept  those on disk; incognito chats end with the server
    """

    def __init__(self, backend: Backend, file: str | Path | None = None) -> None:
        """``file`` keeps the chats; None: the user's. Raises StoreError if it cannot be opened."""
        self.backend = backend
        self.kept = Store(file or default_file())
        self._fleeting = Store(":memory:", first_turn=FIRST_INCOGNITO)
        self.feed = Feed()
        self.speeds = Speeds(backend)
        self.jobs = Jobs(backend, self.feed, self._tell_end, self.speeds)
        self.races = Races(backend, self.feed)
        self._incognito: set[str] = set()

    def close(self) -> None:
        """Save what is running. Called at the server's end."""
        self.jobs.close()
        self.kept.close()
        self._fleeting.close()

    def store_of(self, chat: str) -> Store:
        return self._fleeting if chat in self._incognito else self.kept

    def store_of_turn(self, turn: int) -> Store:
        return self._fleeting if turn >= FIRST_INCOGNITO else self.kept

    # Chats

    def as_json(self, chat: Chat) -> Json:
        is_incognito = chat.id in self._incognito
        return chat_json(chat, self.jobs.running(chat.id), is_incognito=is_incognito)

    def tell(self, chat: Chat) -> Json:
        """Publish a chat of the list, and return it. An incognito chat is in no list."""
        told: Json = self.as_json(chat)
        if chat.deleted_at is not None:
            told = {"id": chat.id, "deleted": True}
        if chat.id not in self._incognito:
            self.feed.publish(chat.owner, "chat", told)
        return told

    async def new(self, owner: str, settings: Mapping[str, Any], *, incognito: bool) -> Json:
        store = self._fleeting if incognito else self.kept
        chat = await in_thread(lambda: store.new_chat(owner, settings))
        if incognito:
            self._incognito.add(chat.id)
        return self.tell(chat)

    async def change(self, owner: str, chat: str, fields: Mapping[str, Any]) -> Json:
        store = self.store_of(chat)
        return self.tell(await in_thread(lambda: store.change_chat(chat, owner, **fields)))

    async def delete(self, owner: str, chat: str) -> None:
        """Delete a chat, and stop its reply."""
        store = self.store_of(chat)
        self.tell(await in_thread(lambda: store.delete_chat(chat, owner)))
        running = self.jobs.running(chat)
        if running is not None:
            self.jobs.stop(running)

    async def restore(self, owner: str, chat: str) -> Json:
        store = self.store_of(chat)
        return self.tell(await in_thread(lambda: store.restore_chat(chat, owner)))

    async def duplicate(self, owner: str, chat: str, turn: int) -> Json:
        store = self.store_of(chat)
        copy = await in_thread(lambda: store.duplicate(chat, owner, turn))
        if chat in self._incognito:
            self._incognito.add(copy.id)
        return self.tell(copy)

    async def open(self, owner: str, chat: str, before: int | None, limit: int) -> Json:
        """A chat with its last turns before one of them. Events up to ``seq`` are in it."""
        store, seq = self.store_of(chat), self.feed.seq
        job = self.jobs.of(chat)
        live = {} if job is None else {job.turn: job.as_json()}

        def read() -> tuple[Chat, list[Json], bool]:
            found = store.chat(chat, owner)
            path = store.path(chat, owner, before=before, limit=limit)
            mark = mark_of(path if before is None else store.path(chat, owner, limit=2), job)
            turns = [turn_json(*one, mark, live.get(one[0].id)) for one in path]
            return found, turns, bool(path) and path[0][0].parent is not None

        found, turns, has_earlier = await in_thread(read)
        return {
            "chat": self.as_json(found),
            "turns": turns,
            "has_earlier": has_earlier,
            "seq": seq,
        }

    # Turns

    async def message(
        self,
        owner: str,
        chat: str,
        text: str,
        files: Sequence[Mapping[str, Any]],
        parent: int | None,
        ask: Ask,
    ) -> Json:
        """Add a message below the turn ``parent``, and begin its reply."""
        if not (text or files):
            raise ApiError(EMPTY, param="text")

        def add(store: Store) -> Turn:
            return store.add_turn(chat, owner, parent, "user", text, files)

        return await self._reply(owner, chat, ask, add, n_new=2)

    async def retry(self, owner: str, turn: int, ask: Ask) -> Json:
        """Begin another reply to a message, given by itself or by one of its replies."""
        found = await self.turn(owner, turn)

        def message(store: Store) -> Turn:
            if found.role == "user":
                return found
            if found.parent is None:
                raise ApiError("this text answers no message, so there is no other reply")
            return store.turn(found.parent, owner)

        return await self._reply(owner, found.chat, ask, message, n_new=1)

    async def edit(
        self, owner: str, turn: int, text: str, files: Sequence[Mapping[str, Any]] | None, ask: Ask
    ) -> Json:
        """Add another version of a message, and begin its reply; or one of a reply.

        Without ``files``, a message keeps its own.
        """
        found = await self.turn(owner, turn)
        chat, parent = found.chat, found.parent
        if found.role == "user":
            kept = found.files if files is None else files
            if not (text or kept):
                raise ApiError(EMPTY, param="text")

            def add(store: Store) -> Turn:
                return store.add_turn(chat, owner, parent, "user", text, kept)

            return await self._reply(owner, chat, ask, add, n_new=2)

        def change(store: Store) -> Chat:
            reply = {name: found.reply.get(name, "") for name in ("method", "model")}
            store.add_turn(chat, owner, parent, "assistant", text, (), reply)
            return store.chat(chat, owner)

        return await self._branch(owner, chat, change, parent)

    async def choose(self, owner: str, turn: int) -> Json:
        """Show the branch of a turn."""
        found = await self.turn(owner, turn)
        return await self._branch(
            owner, found.chat, lambda store: store.choose(turn, owner), found.parent
        )

    async def delete_turn(self, owner: str, turn: int) -> Json:
        """Delete a turn and all that follows it."""
        found = await self.turn(owner, turn)
        with self.jobs.reserved(found.chat):
            return await self._branch(
                owner, found.chat, lambda store: store.delete_turn(turn, owner), found.parent
            )

    async def restore_turn(self, owner: str, turn: int) -> Json:
        """Undo the deletion of a turn."""
        store = self.store_of_turn(turn)
        chat = await in_thread(lambda: store.restore_turn(turn, owner))
        found = await self.turn(owner, turn)
        return await self._branch(owner, chat.id, lambda _: chat, found.parent)

    async def stop(self, owner: str, turn: int) -> None:
        await self.turn(owner, turn)
        self.jobs.stop(turn)

    async def turn(self, owner: str, turn: int) -> Turn:
        store = self.store_of_turn(turn)
        return await in_thread(lambda: store.turn(turn, owner))

    async def proceed(self, owner: str, turn: int, ask: Ask) -> Json:
        """Continue a reply that was cut short."""
        found = await self.turn(owner, turn)
        chat, store = found.chat, self.store_of(found.chat)

        def start() -> _Started:
            settings = self._settings(store, owner, chat, ask)
            path = store.path(chat, owner, limit=1)
            reply = Reply.from_json(found.text, found.reply)
            if not path or path[-1][0].id != turn:
                raise ApiError("only the last reply that is shown can be continued", 409)
            if not reply_fields(reply, found.state)["can_continue"]:
                raise ApiError("this reply has reached its end", 409)
            reply.begin_again(settings.method)
            settings = replace(settings, thinking=reply.thinking)
            store.save_reply(turn, reply.text, reply.as_json(), "running")
            return self._started(store, owner, found, 1, mark_of(path), reply, settings, ask)

        with self.jobs.reserved(chat):
            return self._begin(await in_thread(start))

    async def _reply(
        self, owner: str, chat: str, ask: Ask, message: Callable[[Store], Turn], n_new: int
    ) -> Json:
        """Begin a reply to a message, which is new if ``n_new`` is 2."""
        store = self.store_of(chat)

        def start() -> _Started:
            settings = self._settings(store, owner, chat, ask)
            before = mark_of(store.path(chat, owner, limit=2))
            said = message(store)
            reply = Reply(settings.method, thinking=settings.thinking)
            turn = store.add_turn(
                chat, owner, said.id, "assistant", "", (), reply.as_json(), state="running"
            )
            return self._started(store, owner, turn, n_new, before, reply, settings, ask)

        with self.jobs.reserved(chat):
            return self._begin(await in_thread(start))

    def _settings(self, store: Store, owner: str, chat: str, ask: Ask) -> Settings:
        """The settings of the chat's next reply, which become the chat's."""
        kept = store.chat(chat, owner).settings
        given = kept if ask.settings is None else ask.settings
        settings = settings_of(given, self.backend)
        if given != kept:
            store.change_chat(chat, owner, settings=given)
        return settings

    def _started(
        self,
        store: Store,
        owner: str,
        turn: Turn,
        n_new: int,
        before: Mark,
        reply: Reply,
        settings: Settings,
        ask: Ask,
    ) -> _Started:
        """A job for a reply; the last ``n_new`` turns of its path are new."""
        chat = turn.chat
        path = store.path(chat, owner, leaf=turn.id)
        begun = [replace(turn, text=reply.text)] if reply.text else []
        read = [one for one, _ in path[:-1]] + begun
        prompt = prompt_of(read, settings.system)
        reply.left_out = prompt.left_out(*before)
        reply.reads_from = prompt.first_read(reply.left_out)
        model = self.backend.status().model
        if model is not None:
            reply.model, reply.n_ctx = Path(model.spec.model).name, model.n_ctx
        request = self._request(chat, prompt, settings, ask, reply.left_out)
        job = Job(owner, store, chat, turn.id, reply, prompt, request)
        job.shown.update(reply)
        turns = [turn_json(*one, job.mark) for one in path[-n_new:-1]]
        turns.append(turn_json(*path[-1], job.mark, job.as_json()))
        return _Started(job, turns, store.chat(chat, owner), before)

    def _request(
        self,
        chat: str | None,
        prompt: Prompt,
        settings: Settings,
        ask: Ask,
        left_out: LeftOut = NOTHING,
    ) -> ChatRequest:
        is_incognito = chat in self._incognito
        return ChatRequest(
            uuid4().hex,
            prompt.messages,
            settings.method,
            settings.sampling,
            settings.max_tokens,
            settings.thinking,
            settings.leave_out,
            left_out,
            memory=None if is_incognito else ask.memory,
            on_disk=not is_incognito,
            record=True,
        )

    def _begin(self, started: _Started) -> Json:
        job, turns, chat, mark = started
        self.feed.publish(
            chat.owner,
            "turns",
            {
                "chat": chat.id,
                "after": turns[0]["parent"],
                "turns": turns,
                "leaf": job.turn,
                "has_earlier": turns[0]["parent"] is not None,
            },
        )
        seq = self.feed.seq
        self.jobs.move_mark(chat.owner, chat.id, mark, job.mark)
        self.jobs.start(job)
        return {"turns": turns, "chat": self.tell(chat), "seq": seq}

    async def _branch(
        self, owner: str, chat: str, change: Callable[[Store], Chat], after: int | None
    ) -> Json:
        """Change which branch of a chat is shown, from the turn ``after`` on."""
        store = self.store_of(chat)
        job = self.jobs.of(chat)
        live = {} if job is None else {job.turn: job.as_json()}

        def read() -> tuple[Chat, list[Json], Mark, Mark]:
            before = mark_of(store.path(chat, owner, limit=2), job)
            found = change(store)
            path = store.path(chat, owner)
            mark = mark_of(path, job)
            ids = [turn.id for turn, _ in path]
            shown = path[ids.index(after) + 1 if after in ids else 0 :][-MOST_TURNS:]
            turns = [turn_json(*one, mark, live.get(one[0].id)) for one in shown]
            return found, turns, before, mark

        found, turns, before, mark = await in_thread(read)
        first = turns[0]["parent"] if turns else after
        told = {
            "chat": chat,
            "after": after if first == after else None,
            "turns": turns,
            "leaf": found.leaf,
            "has_earlier": first is not None,
        }
        self.feed.publish(owner, "turns", told)
        self.jobs.move_mark(owner, chat, before, mark)
        self.tell(found)
        return told

    # Races

    async def race_turn(
        self, owner: str, turn: int, methods: tuple[str, str], rounds: int, ask: Ask
    ) -> str:
        """Start a race on the message of a turn; returns its id."""
        found = await self.turn(owner, turn)
        store = self.store_of(found.chat)
        path = await in_thread(lambda: store.path(found.chat, owner, leaf=turn))
        turns = [one for one, _ in path]
        last = max((at for at, one in enumerate(turns) if one.role == "user"), default=None)
        if last is None:
            raise ApiError("this text answers no message, so nothing can be raced")
        given = ask.settings
        if given is None:
            given = (await in_thread(lambda: store.chat(found.chat, owner))).settings
        asked = replace(ask, settings=given)
        return self._race(owner, found.chat, turns[: last + 1], methods, rounds, asked)

    def race_text(
        self, owner: str, text: str, methods: tuple[str, str], rounds: int, ask: Ask
    ) -> str:
        """Start a race on a message without a chat; returns its id."""
        return self._race(owner, None, [Turn(0, "", None, "user", text)], methods, rounds, ask)

    def _race(
        self,
        owner: str,
        chat: str | None,
        turns: Sequence[Turn],
        methods: tuple[str, str],
        rounds: int,
        ask: Ask,
    ) -> str:
        given = dict(ask.settings or {})
        own = str(given.get("method", "")).partition(":")[0]

        def settings(method: str) -> Settings:
            parameters = given.get("parameters") if method == own else None
            return settings_of({**given, "method": method, "parameters": parameters}, self.backend)

        first, second = map(settings, methods)
        prompt = prompt_of(turns, first.system)
        request = self._request(chat, prompt, first, ask)
        return self.races.start(owner, request, (first.method, second.method), rounds)

    async def _tell_end(self, job: Job) -> None:
        try:
            chat = await in_thread(lambda: job.store.chat(job.chat, job.owner))
        except ApiError:  # it was deleted meanwhile
            return
        self.tell(chat)


def mark_of(path: Sequence[tuple[Turn, object]], job: Job | None = None) -> Mark:
    """What the last prompt of a path began with; ``job`` is the chat's, if it has one."""
    if job is not None and any(turn.id == job.turn for turn, _ in path):
        return job.mark
    reply = next((turn.reply for turn, _ in reversed(path) if turn.role == "assistant"), {})
    reads_from = reply.get("reads_from")
    return reads_from, int(reply.get("n_ctx", 0)) if reads_from is not None else 0


def settings_of(values: Mapping[str, Any], backend: Backend) -> Settings:
    """Settings as ``read_settings`` reads them. Raises ApiError with ``param``, their name."""
    try:
        return read_settings(values, backend.methods())
    except InvalidSetting as error:
        raise ApiError(str(error), 400, param=error.name) from error


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns, which may wait for the disk. Raises ApiError for its StoreError."""
    try:
        return await asyncio.to_thread(work)
    except NoSuchChat as error:
        raise ApiError(str(error), 404) from error
    except StoreError as error:
        raise ApiError(str(error), 507) from error
