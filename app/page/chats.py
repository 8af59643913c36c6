"""The chats of the page: what the routes do, for their owners, and what the stream tells of it.

Knows the store, the jobs and the backend, but nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any
from uuid import uuid4

from app.api.errors import ApiError
from app.mcp.servers import Servers
from app.page.apart import Apart
from app.page.feed import Feed
from app.page.jobs import Job, Jobs
from app.page.owners import STRANGER
from app.page.prompt import Prompt, prompt_of
from app.page.race import Races
from app.page.reply import Reply, ToolCall
from app.page.settings import How, Settings, read_settings, varied
from app.page.speeds import Speeds
from app.page.status import StatusNews
from app.page.titles import Titles
from app.page.tools import Answer, are_done, take
from app.page.turns import reply_fields, turn_json, while_shown
from app.store import Chat, Found, Imported, Store, StoreError, Turn
from app.worker.backend import Backend
from app.worker.messages import ChatRequest
from speculation.registry.entries import title_of

Json = dict[str, Any]
Files = Sequence[Mapping[str, Any]]  # of a message, with names and texts
Methods = tuple[str, str]  # that race
Branch = Sequence[tuple[Turn, Sequence[int]]]  # turns with their siblings
FIRST_INCOGNITO = 2**40  # the least id of a turn that is only in memory
EMPTY = "the message is empty; give a text or a file"
LEAF = -1  # as a message's parent: the turn that is shown last
MOST_TURNS = 30  # that are sent at once


@dataclass(frozen=True)
class Ask:
    """Who asks for a reply, and with what.

    settings    as JSON; None: the chat's
    is_trusted  whether it may have tools
    """

    owner: str
    settings: Mapping[str, Any] | None = None
    is_trusted: bool = True


class Chats:
    """All chats of all owners.

    kept  those on disk; incognito chats end with the server
    """

    def __init__(self, backend: Backend, store: Store, servers: Servers) -> None:
        """``store`` keeps the chats; it and the ``servers`` of tools are closed with them."""
        self.backend = backend
        self.kept = store
        self._fleeting = Store(":memory:", first_turn=FIRST_INCOGNITO)
        self.feed = Feed()
        self.speeds = Speeds(backend)
        self.servers = servers
        self.jobs = Jobs(backend, self.feed, self._tell_end, self.speeds, servers)
        self.races = Races(backend, self.feed)
        self._titles = Titles(backend)
        self.news, self.apart = StatusNews(backend, self.feed), Apart()
        self._incognito: set[str] = set()

    def close(self) -> None:
        """Save what is running. Called at the server's end."""
        self.jobs.close()
        self.servers.close()
        self.kept.close()
        self._fleeting.close()

    def store_of(self, chat: str) -> Store:
        return self._fleeting if chat in self._incognito else self.kept

    def store_of_turn(self, turn: int) -> Store:
        return self._fleeting if turn >= FIRST_INCOGNITO else self.kept

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """What settings mean for the loaded model. Raises ApiError."""
        return read_settings(values, self.backend.methods(), self.backend.status().facts.sampling)

    # Chats

    def as_json(self, chat: Chat) -> Json:
        names = ("id", "title", "changed_at", "is_pinned", "settings", "leaf")
        return {
            **{name: getattr(chat, name) for name in names},
            "running": self.jobs.running(chat.id),
            "incognito": chat.id in self._incognito,
        }

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
        chat = await store.transaction(lambda store: store.new_chat(owner, settings))
        if incognito:
            self._incognito.add(chat.id)
        return self.tell(chat)

    async def change(self, chat: str, change: Callable[[Store], Chat]) -> Json:
        """Change a chat, but not its turns, and tell of it."""
        return self.tell(await self.store_of(chat).transaction(change))

    async def delete(self, owner: str, chat: str) -> None:
        """Delete a chat, and stop its reply."""
        await self.change(chat, lambda store: store.delete_chat(chat, owner))
        self.jobs.stop(self.jobs.running(chat))

    async def duplicate(self, owner: str, chat: str, turn: int) -> Json:
        copy = await self.store_of(chat).transaction(lambda s: s.duplicate(chat, owner, turn))
        if chat in self._incognito:
            self._incognito.add(copy.id)
        return self.tell(copy)

    def add(self, owner: str, found: Iterable[Found | str]) -> Imported:
        """Add the chats of an export. Settings that no reply can be made with are left out."""

        def fit(one: Found) -> Found:
            try:
                self.settings(one.chat.settings)
            except ApiError:
                return replace(one, chat=replace(one.chat, settings={}))
            return one

        return self.kept.add(owner, (one if isinstance(one, str) else fit(one) for one in found))

    async def open(self, owner: str, chat: str, before: int | None, limit: int) -> Json:
        """A chat with its last turns before one of them. Events up to ``seq`` are in it."""
        seq, live = self.feed.seq, self.jobs.shown(chat)

        def read(store: Store) -> tuple[Chat, Branch]:
            path = store.path(chat, owner, before=before, limit=limit)
            return store.chat(chat, owner), path

        found, path = await self.store_of(chat).transaction(read)
        return {
            "chat": self.as_json(found),
            "turns": await as_json(path, live),
            "has_earlier": bool(path) and path[0][0].parent is not None,
            "seq": seq,
        }

    # Branches

    async def turn(self, owner: str, turn: int) -> Turn:
        return await self.store_of_turn(turn).transaction(lambda store: store.turn(turn, owner))

    async def choose(self, owner: str, turn: int) -> Json:
        """Show the branch of a turn."""
        found = await self.turn(owner, turn)
        return await self._branch(owner, found, lambda store: store.choose(turn, owner))

    async def delete_turn(self, owner: str, turn: int) -> Json:
        """Delete a turn and all that follows it."""
        found = await self.turn(owner, turn)
        with self.jobs.reserved(found.chat):
            return await self._branch(owner, found, lambda store: store.delete_turn(turn, owner))

    async def restore_turn(self, owner: str, turn: int) -> Json:
        """Undo the deletion of a turn."""
        store = self.store_of_turn(turn)
        chat = await store.transaction(lambda store: store.restore_turn(turn, owner))
        return await self._branch(owner, await self.turn(owner, turn), lambda _: chat)

    async def _branch(self, owner: str, turn: Turn, change: Callable[[Store], Chat]) -> Json:
        """Change which branch of a chat is shown, from one of a turn's siblings on."""
        chat, after = turn.chat, turn.parent
        live = self.jobs.shown(chat)

        def read(store: Store) -> tuple[Chat, Branch]:
            found, path = change(store), store.path(chat, owner)
            ids = [turn.id for turn, _ in path]
            return found, path[ids.index(after) + 1 if after in ids else 0 :][-MOST_TURNS:]

        found, path = await self.store_of(chat).transaction(read)
        first = path[0][0].parent if path else after
        told = {
            "chat": chat,
            "after": after if first == after else None,
            "turns": await as_json(path, live),
            "has_earlier": first is not None,
            "is_growing": bool(live),  # the reply has grown since: the page reads the chat again
        }
        self.feed.publish(owner, "turns", told)
        self.tell(found)
        return told

    # Replies

    async def message(
        self, ask: Ask, chat: str, text: str, files: Sequence[Mapping[str, Any]], parent: int | None
    ) -> Json:
        """Add a message below the turn ``parent``, and begin its reply."""
        if not (text or files):
            raise ApiError(EMPTY, param="text")

        def begun(store: Store, settings: Settings) -> tuple[int, Reply]:
            above = store.chat(chat, ask.owner).leaf if parent == LEAF else parent
            said = store.add_turn(chat, ask.owner, above, "user", text, files)
            return _new_reply(store, said, ask, settings)

        return await self._begin(ask, chat, begun, n_new=2)

    async def retry(self, ask: Ask, turn: int, how: How = "again") -> Json:
        """Begin another reply to a message, given by itself or by one of its replies."""
        found = await self.turn(ask.owner, turn)
        message = found.id if found.role == "user" else found.parent
        if message is None:
            raise ApiError("this text answers no message, so there is no other reply")

        return await self._reply_to(ask, found.chat, message, how)

    async def _reply_to(self, ask: Ask, chat: str, turn: int, how: How | None = None) -> Json:
        def begun(store: Store, settings: Settings) -> tuple[int, Reply]:
            return _new_reply(store, store.turn(turn, ask.owner), ask, settings)

        return await self._begin(ask, chat, begun, how=how)

    async def edit(self, ask: Ask, turn: int, text: str, files: Files | None) -> Json:
        """Add another version of a message, and begin its reply; or one of a reply.

        Without ``files``, a message keeps its own.
        """
        found = await self.turn(ask.owner, turn)
        if found.role == "user":
            kept = found.files if files is None else files
            return await self.message(ask, found.chat, text, kept, found.parent)

        def change(store: Store) -> Chat:
            reply = {name: found.reply.get(name, "") for name in ("method", "model")}
            store.add_turn(found.chat, ask.owner, found.parent, "assistant", text, (), reply)
            return store.chat(found.chat, ask.owner)

        return await self._branch(ask.owner, found, change)

    async def proceed(self, ask: Ask, turn: int) -> Json:
        """Continue a reply that was cut short."""
        found = await self.turn(ask.owner, turn)

        def begun(store: Store, settings: Settings) -> tuple[int, Reply]:
            reply = Reply.from_json(found.text, found.reply)
            if store.chat(found.chat, ask.owner).leaf != turn:
                raise ApiError("only the last reply that is shown can be continued", 409)
            if not reply_fields(reply, found.state)["can_continue"]:
                raise ApiError("this reply has reached its end", 409)
            reply.begin_again(settings.method)
            store.save_reply(turn, reply.text, reply.as_json(), "running")
            return turn, reply

        return await self._begin(ask, found.chat, begun)

    async def answer(self, ask: Ask, turn: int, number: int, answer: Answer) -> Json:
        """Take the user's answer to a call of the last reply; if it is allowed, it is made."""
        chat = (await self.turn(ask.owner, turn)).chat
        store = self.store_of(chat)

        def read(store: Store) -> tuple[Chat, Turn]:
            return store.chat(chat, ask.owner), store.turn(turn, ask.owner)

        with self.jobs.reserved(chat):
            found, kept = await store.transaction(read)
            reply = Reply.from_json(kept.text, kept.reply)
            call = reply.calls[number] if number < len(reply.calls) else None
            if call is None or not call.waits or found.leaf != turn:
                raise ApiError("this call does not wait for an answer any more", 409)
            tools = self.settings(found.settings).tools
            if answer != "never":
                self._check_trust(ask)
                if call.tool in tools.get(call.server, (call.tool,)):
                    why = f"this chat no longer uses {call.tool} of {call.server}"
                    raise ApiError(f"{why}; choose it among the tools in the settings", 409)
            await store.transaction(lambda store: take(store, chat, ask.owner, call, answer))
            job = Job(ask.owner, store, chat, turn, reply, Prompt((), ()), None)
            job.allowed = call if answer == "once" else None
            await while_shown(lambda: job.shown.update(reply, is_over=True))
            self.jobs.start(job)
        return {}

    def _check_trust(self, ask: Ask) -> None:
        if not ask.is_trusted:
            raise ApiError(STRANGER, 403)

    async def _begin(
        self,
        ask: Ask,
        chat: str,
        begun: Callable[[Store, Settings], tuple[int, Reply]],
        n_new: int = 1,
        how: How | None = None,
    ) -> Json:
        """Start the job of a reply that ``begun`` adds to the chat; the last ``n_new`` turns of its
        path are new. The settings become the chat's, but for ``how`` another reply differs."""
        owner = ask.owner

        def prepare(store: Store) -> tuple[Job, Branch, Chat]:
            kept = store.chat(chat, owner).settings
            given = kept if ask.settings is None else ask.settings
            settings = self.settings(given)
            if how is not None:
                settings = self.settings(varied(given, how, settings))
            if settings.tools:
                self._check_trust(ask)
            if given != kept:
                store.change_chat(chat, owner, settings=given)
            last = store.path(chat, owner, limit=2)
            before = next((turn.reply for turn, _ in last[::-1] if turn.role == "assistant"), {})
            turn, reply = begun(store, settings)
            path = store.path(chat, owner, leaf=turn)
            said = [replace(path[-1][0], text=reply.text)] if reply.text else []
            prompt = prompt_of([one for one, _ in path[:-1]] + said, settings.system)
            was = Reply.from_json("", before)
            left_out = prompt.left_out(was.reads_from, was.n_ctx)
            reply.n_left_out = left_out.n_turns
            reply.reads_from = prompt.first_read(left_out.n_turns)
            model = self.backend.status().model
            if model is not None:
                reply.model = title_of(model.spec.model)
                reply.n_ctx = left_out.n_ctx or model.n_ctx
            settings = replace(settings, thinking=reply.thinking)
            request = replace(self._request(chat, prompt, settings, ask), left_out=left_out)
            rounds = _rounds([one for one, _ in path[:-1]])
            reply.earlier = rounds[0] if rounds else ()
            tools = {} if are_done(rounds) else settings.tools
            job = Job(owner, store, chat, turn, reply, prompt, request, tools)
            return job, path[-n_new:], store.chat(chat, owner)

        with self.jobs.reserved(chat):
            job, path, found = await self.store_of(chat).transaction(prepare)
            await while_shown(lambda: job.shown.update(job.reply))
            turns = await as_json(path, {job.turn: job.as_json()})
            after = turns[0]["parent"]
            told = {"chat": chat, "after": after, "turns": turns, "has_earlier": after is not None}
            self.feed.publish(owner, "turns", told)
            seq = self.feed.seq
            self.jobs.start(job)
            return {"turns": turns, "chat": self.tell(found), "seq": seq}

    def _request(self, chat: str, prompt: Prompt, settings: Settings, ask: Ask) -> ChatRequest:
        return ChatRequest(
            uuid4().hex,
            prompt.messages,
            settings.method,
            settings.sampling,
            settings.max_tokens or None,
            settings.thinking,
            settings.leave_out,
            memory=None if chat in self._incognito else ask.owner,
            on_disk=False,  # a deleted chat must leave nothing there
            record=True,
        )

    # Races

    async def race_turn(self, ask: Ask, turn: int, methods: Methods, rounds: int) -> str:
        """Start a race on the message of a turn; returns its id."""

        def read(store: Store) -> tuple[Chat, list[Turn]]:
            chat = store.chat(store.turn(turn, ask.owner).chat, ask.owner)
            return chat, [one for one, _ in store.path(chat.id, ask.owner, leaf=turn)]

        kept, turns = await self.store_of_turn(turn).transaction(read)
        while turns and turns[-1].role != "user":
            turns.pop()
        if not turns:
            raise ApiError("this text answers no message, so nothing can be raced")
        if ask.settings is None:
            ask = replace(ask, settings=kept.settings)
        return self.race(ask, turns, methods, rounds, kept.id)

    def race(
        self, ask: Ask, turns: Sequence[Turn], methods: Methods, rounds: int, chat: str = ""
    ) -> str:
        """Start a race on turns, whose last one is a message; returns its id."""
        given = dict(ask.settings or {})
        own = str(given.get("method", "")).partition(":")[0]

        def settings(method: str) -> Settings:
            parameters = given.get("parameters") if method == own else None
            return self.settings({**given, "method": method, "parameters": parameters})

        first, second = map(settings, methods)
        prompt = prompt_of(turns, first.system)
        request = self._request(chat, prompt, first, ask)
        return self.races.start(ask.owner, request, (first.method, second.method), rounds)

    async def _tell_end(self, job: Job) -> None:
        states = {call.state for call in job.reply.calls}
        if states and not job.is_stopped and states.isdisjoint(("asked", "running")):
            try:
                await self._reply_to(Ask(job.owner), job.chat, job.turn)
                return
            except (ApiError, StoreError) as error:
                job.reply.error = str(error)
        try:
            chat = await job.store.transaction(lambda store: store.chat(job.chat, job.owner))
        except StoreError:  # it was deleted meanwhile
            return
        self.tell(chat)
        if chat.id not in self._incognito and not chat.is_named:
            self._titles.want(job, self._take_title)

    async def _take_title(self, job: Job, title: str) -> None:
        with suppress(StoreError):
            given = job.chat, job.owner, title
            await self.change(job.chat, lambda store: store.suggest_title(*given))


def _rounds(path: Sequence[Turn]) -> list[list[ToolCall]]:
    """The calls of the replies at the end of a path, the last one first."""
    ends = takewhile(lambda turn: turn.reply.get("calls"), reversed(path))
    return [Reply.from_json("", turn.reply).calls for turn in ends]


def _new_reply(store: Store, message: Turn, ask: Ask, settings: Settings) -> tuple[int, Reply]:
    """Add a reply to a message; returns its turn, too."""
    reply = Reply(settings.method, thinking=settings.thinking)
    chat, owner, kept = message.chat, ask.owner, reply.as_json()
    turn = store.add_turn(chat, owner, message.id, "assistant", "", (), kept, "running")
    return turn.id, reply


async def as_json(path: Branch, live: Mapping[int, Json]) -> list[Json]:
    """The turns of a path. ``live`` has what is shown of the reply that is being generated."""

    def shown() -> list[Json]:
        return [turn_json(turn, siblings, live.get(turn.id)) for turn, siblings in path]

    return await while_shown(shown)
