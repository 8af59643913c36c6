"""The page's routes under /page/: chats, turns and the stream."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from pydantic import Base64Bytes, BaseModel, Field
from starlette.responses import StreamingResponse

from app.api.body import Limited
from app.api.errors import ApiError
from app.api.json_text import dumps
from app.api.replies import while_connected
from app.api.sse import EventStream, with_pings
from app.page import steps
from app.page.apart import Apart, Unreadable
from app.page.chats import LEAF, MOST_TURNS, Ask, Chats, settings_of
from app.page.feed import encoded
from app.page.imported import chats_of
from app.page.owners import Owners
from app.page.pdf import text_of_pdf
from app.page.race import ROUNDS
from app.page.threads import as_api_errors, in_store, while_shown
from app.store import Hit, Turn
from app.worker.messages import LoadedModel, ModelFacts, Status
from speculation.registry import RegistryError, read_registry

PING_SECONDS = 15.0
STATUS_SECONDS = 0.5  # between looks at the backend's status
Json = dict[str, Any]


TurnId = Annotated[int, Field(ge=0, lt=2**53)]


class NewChat(BaseModel):
    settings: Json = Field(default_factory=dict)
    incognito: bool = False


class Change(BaseModel):
    """The fields of a chat that a client changes."""

    title: str | None = None
    is_pinned: bool | None = None
    settings: Json | None = None


class GivenFile(BaseModel):
    """A file of a message: its text, a PDF, or which of the edited message's files it is."""

    name: str = ""
    text: str = ""
    leads: bool = True
    pdf: Base64Bytes = b""
    kept: int | None = None


class Reply(BaseModel):
    """What a new reply is asked for with; without settings, with the chat's."""

    settings: Json | None = None


class Edit(Reply):
    text: str = ""
    files: list[GivenFile] | None = None


class Message(Reply):
    text: str = ""
    files: list[GivenFile] = Field(default_factory=list)
    parent: TurnId | None = LEAF


class Race(Reply):
    methods: tuple[str, str]
    rounds: int = Field(ROUNDS, ge=1, le=20)


class RaceOnText(Race):
    prompt: str = Field(min_length=1)


class At(BaseModel):
    turn: TurnId


class NewPreset(BaseModel):
    name: str = Field(min_length=1, max_length=200)
    settings: Json


class OldPreset(BaseModel):
    id: TurnId


async def _compressed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, compressed one by one: what is sent again while a block grows then costs next to
    nothing."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    async for chunk in chunks:
        yield packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH)


def owner_of(http: Request) -> str:
    owners: Owners = http.app.state.owners
    return owners.of(http)


Owner = Annotated[str, Depends(owner_of)]


def add_routes(app: FastAPI, chats: Chats, owners: Owners) -> None:
    app.state.owners = owners
    apart = Apart()
    app.include_router(_routes(chats, owners, apart))
    app.include_router(_imports(chats, apart))


def _routes(chats: Chats, owners: Owners, apart: Apart) -> APIRouter:
    router = APIRouter(prefix="/page", route_class=Limited, tags=["page"])
    store, feed, backend = chats.kept, chats.feed, chats.backend
    watching: list[asyncio.Task[None]] = []
    seen = backend.status()
    # The loaded model, and how it is told: models.txt is not read at each change of a status.
    model: tuple[Any, Json | None] = (None, None)

    def status() -> Status:
        """The backend's status; publishes it if it has changed, whoever asks first."""
        nonlocal seen
        if (now := backend.status()) != seen:
            seen = now
            feed.publish(None, "status", status_json(now))
        return seen

    def status_json(status: Status) -> Json:
        nonlocal model
        if (status.model, status.facts) != model[0]:
            told = None if status.model is None else model_json(status.model, status.facts)
            model = (status.model, status.facts), told
        return {
            "model": model[1],
            "loading": asdict(status.loading) if status.loading is not None else None,
            "error": status.error,
            "is_down": status.is_down,
        }

    async def watch_status() -> None:
        while True:
            status()
            await asyncio.sleep(STATUS_SECONDS)

    @router.get("/state")
    async def state(http: Request) -> Response:
        response = Response(media_type="application/json")
        owner, shown, seq = owners.ensure_cookie(http, response), status(), feed.seq
        presets = await in_store(store, lambda: store.presets(owner))
        found = {
            "owner": owner,
            "status": status_json(shown),
            "methods": [asdict(method) for method in backend.methods()],
            "presets": [asdict(preset) for preset in presets],
            "notice": store.notice,
            "seq": seq,
        }
        response.body = encoded(dumps(found))
        response.headers["content-length"] = str(len(response.body))
        return response

    @router.get("/events")
    async def events(http: Request, owner: Owner, after: str = "") -> Response:
        last = http.headers.get("last-event-id", after)
        if not watching:
            watching.append(asyncio.ensure_future(watch_status()))
        found = feed.events(owner, int(last) if last.isdecimal() else None)
        chunks = with_pings(found, PING_SECONDS)
        if "gzip" not in http.headers.get("accept-encoding", ""):
            return EventStream(chunks)
        return EventStream(_compressed(chunks), {"content-encoding": "gzip"})

    # Chats

    @router.get("/chats")
    async def list_chats(
        owner: Owner,
        before: str | None = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        found = await in_store(store, lambda: store.chats(owner, before=before, limit=limit))
        return as_json({"chats": [chats.as_json(chat) for chat in found]})

    @router.get("/search")
    async def search(owner: Owner, q: str) -> Response:
        hits = await in_store(store, lambda: store.search(owner, q))
        return as_json({"hits": [hit_json(chats, hit) for hit in hits]})

    @router.post("/chats")
    async def new_chat(owner: Owner, body: NewChat) -> Response:
        settings_of(body.settings, backend)
        return as_json(await chats.new(owner, body.settings, incognito=body.incognito))

    @router.get("/chats/{chat}")
    async def open_chat(
        owner: Owner,
        chat: str,
        before: TurnId | None = None,
        limit: Annotated[int, Query(ge=1, le=500)] = MOST_TURNS,
    ) -> Response:
        return as_json(await chats.open(owner, chat, before, limit))

    @router.patch("/chats/{chat}")
    async def change_chat(owner: Owner, chat: str, body: Change) -> Response:
        if body.settings is not None:
            settings_of(body.settings, backend)
        fields = body.model_dump(exclude_none=True)
        return as_json(
            await chats.change(chat, lambda store: store.change_chat(chat, owner, **fields))
        )

    @router.delete("/chats/{chat}")
    async def delete_chat(owner: Owner, chat: str) -> Response:
        await chats.delete(owner, chat)
        return as_json({})

    @router.post("/chats/{chat}/restore")
    async def restore_chat(owner: Owner, chat: str) -> Response:
        return as_json(await chats.change(chat, lambda store: store.restore_chat(chat, owner)))

    @router.post("/chats/{chat}/duplicate")
    async def duplicate(owner: Owner, chat: str, body: At) -> Response:
        return as_json(await chats.duplicate(owner, chat, body.turn))

    @router.get("/chats/{chat}/export")
    async def export_chat(
        owner: Owner, chat: str, kind: Annotated[str, Query(alias="format")] = "json"
    ) -> Response:
        kept = chats.store_of(chat)
        title = (await in_store(kept, lambda: kept.chat(chat, owner))).title
        name = " ".join(re.sub(r"[^\w.-]+", " ", title).split())[:60] or "chat"
        if kind == "md":
            text = await in_store(kept, lambda: kept.as_markdown(chat, owner))
            return _download(iter([text]), f"{name}.md", "text/markdown")
        return _download(kept.export_json(owner, chat), f"{name}.json", "application/json")

    @router.get("/export")
    async def export(owner: Owner) -> Response:
        return _download(store.export_json(owner), "chats.json", "application/json")

    # Turns

    @router.post("/chats/{chat}/messages")
    async def message(http: Request, owner: Owner, chat: str, body: Message) -> Response:
        files = await while_connected(http, _files(body.files, (), apart))
        ask = Ask(owner, body.settings)
        return as_json(await chats.message(ask, chat, _said(body.text), files, body.parent))

    @router.post("/turns/{turn}/retry")
    async def retry(owner: Owner, turn: TurnId, body: Reply) -> Response:
        return as_json(await chats.retry(Ask(owner, body.settings), turn))

    @router.post("/turns/{turn}/continue")
    async def proceed(owner: Owner, turn: TurnId, body: Reply) -> Response:
        return as_json(await chats.proceed(Ask(owner, body.settings), turn))

    @router.post("/turns/{turn}/edit")
    async def edit(http: Request, owner: Owner, turn: TurnId, body: Edit) -> Response:
        given, files = body.files, None
        if given is not None:
            old = (await chats.turn(owner, turn)).files
            files = await while_connected(http, _files(given, old, apart))
        ask = Ask(owner, body.settings)
        return as_json(await chats.edit(ask, turn, _said(body.text), files))

    @router.post("/turns/{turn}/choose")
    async def choose(owner: Owner, turn: TurnId) -> Response:
        return as_json(await chats.choose(owner, turn))

    @router.post("/turns/{turn}/stop")
    async def stop(owner: Owner, turn: TurnId) -> Response:
        await chats.turn(owner, turn)
        chats.jobs.stop(turn)
        return as_json({})

    @router.delete("/turns/{turn}")
    async def delete_turn(owner: Owner, turn: TurnId) -> Response:
        return as_json(await chats.delete_turn(owner, turn))

    @router.post("/turns/{turn}/restore")
    async def restore_turn(owner: Owner, turn: TurnId) -> Response:
        return as_json(await chats.restore_turn(owner, turn))

    @router.get("/turns/{turn}/files/{number}")
    async def read_file(owner: Owner, turn: TurnId, number: int) -> Response:
        files = (await chats.turn(owner, turn)).files
        if not 0 <= number < len(files):
            raise ApiError(
                f"this message has {len(files)} files, and none with number {number}", 404
            )
        return as_json(files[number])

    @router.get("/turns/{turn}/steps")
    async def read_steps(owner: Owner, turn: TurnId) -> Response:
        store = chats.store_of_turn(turn)
        kept = await in_store(store, lambda: store.steps(turn, owner))
        with suppress(ValueError):  # an earlier version's import kept anything
            if kept is not None:
                shown = await while_shown(lambda: steps.shown(kept))
                return Response(shown, media_type="application/json")
        raise ApiError("the steps of this reply are not kept", 404)

    # Races

    @router.post("/turns/{turn}/race")
    async def race_turn(owner: Owner, turn: TurnId, body: Race) -> Response:
        ask = Ask(owner, body.settings)
        return as_json({"race": await chats.race_turn(ask, turn, body.methods, body.rounds)})

    @router.post("/race")
    async def race_text(owner: Owner, body: RaceOnText) -> Response:
        said = Turn(0, "", None, "user", body.prompt)
        ask = Ask(owner, body.settings)
        return as_json({"race": chats.race(ask, [said], body.methods, body.rounds)})

    @router.delete("/races/{race}")
    async def stop_race(owner: Owner, race: str) -> Response:
        chats.races.stop(owner, race)
        return as_json({})

    # Presets

    @router.post("/presets")
    async def save_preset(owner: Owner, body: NewPreset) -> Response:
        settings_of(body.settings, backend)
        return as_json(
            asdict(
                await in_store(store, lambda: store.save_preset(owner, body.name, body.settings))
            )
        )

    @router.delete("/presets")
    async def delete_preset(owner: Owner, body: OldPreset) -> Response:
        await in_store(store, lambda: store.delete_preset(owner, body.id))
        return as_json({})

    return router


def _imports(chats: Chats, apart: Apart) -> APIRouter:
    """The import, whose bodies may have as many values as they like: another process reads them."""
    router = APIRouter(prefix="/page", tags=["page"])

    @router.post("/import")
    async def import_chats(http: Request, owner: Owner) -> Response:
        try:
            read = await while_connected(http, apart.read(chats_of, await http.body()))
            with as_api_errors():
                found = await asyncio.to_thread(chats.add, owner, read)
        except Unreadable as error:
            raise ApiError(f"Cannot import this file: {error}.") from error
        told = [chats.tell(chat) for chat in found.chats]
        return as_json({"chats": told, "n_known": found.n_known, "refused": found.refused})

    return router


def as_json(data: Any) -> Response:
    """The data as an answer."""
    return Response(encoded(dumps(data)), media_type="application/json")


def _download(parts: Iterator[str], name: str, kind: str) -> Response:
    plain = name.encode("ascii", "replace").decode().replace("?", "_")
    headers = {
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name)}",
        "cache-control": "no-store",
    }
    return StreamingResponse(parts, headers=headers, media_type=kind)


def _said(text: str) -> str:
    """The text without empty lines around it."""
    return text.strip("\n") if text.strip() else ""


async def _files(
    given: list[GivenFile], old: tuple[Mapping[str, Any], ...], apart: Apart
) -> list[Mapping[str, Any]]:
    """The files as they are kept; ``old`` are those of the edited message."""
    found: list[Mapping[str, Any]] = []
    for number, file in enumerate(given):
        if file.kept is None:
            text = file.text
            if file.pdf:
                try:
                    pages = await apart.read(text_of_pdf, file.pdf)
                    text = "\n\n".join(pages)
                except Unreadable as error:
                    why = f"{file.name} cannot be read as a PDF: {error}"
                    raise ApiError(why, param=f"files[{number}]") from error
            found.append({"name": file.name, "text": text, "leads": file.leads})
        elif 0 <= file.kept < len(old):
            found.append(old[file.kept])
        else:
            raise ApiError(f"the message has no file {file.kept}", param=f"files[{number}].kept")
    return found


def hit_json(chats: Chats, hit: Hit) -> Json:
    snippet = re.split("[\x02\x03]", hit.snippet)
    return {"chat": chats.as_json(hit.chat), "turn": hit.turn, "snippet": snippet}


def model_json(model: LoadedModel, facts: ModelFacts) -> Json:
    """The loaded model; ``missing`` are the methods that cannot run, what each needs, and the names
    that models.txt has for it."""
    try:
        entries = read_registry()
    except RegistryError:  # whoever loads a model hears of it
        entries = {}
    entry = entries.get(model.spec.model)

    def offer(method: str, setting: str) -> list[str]:
        if entry is None:
            return []
        if setting == "heads":
            return [name for name in entry.heads if method in entries[name].methods]
        return [entry.draft] if setting == "draft_model" and entry.draft else []

    missing = {
        method: {"setting": setting, "offer": offer(method, setting)}
        for method, setting in facts.missing.items()
    }
    name = re.split(r"[/\\]", model.spec.model)[-1]
    return {**asdict(model), "name": name, "missing": missing}
