"""The page's routes under /page/: chats, turns and the stream."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Body, Depends, FastAPI, Query, Request, Response
from pydantic import Base64Bytes, BaseModel, Field
from starlette.responses import StreamingResponse

from app.api.answers import EventStream, as_json
from app.api.body import Limited
from app.api.errors import ApiError, answer_errors
from app.api.log import Call, current_call
from app.api.replies import while_connected
from app.api.service import memory_of
from app.mcp.servers import Kind, ToolError
from app.page import steps
from app.page.apart import Apart, Unreadable
from app.page.chats import LEAF, MOST_TURNS, Ask, Chats
from app.page.imported import chats_of
from app.page.owners import Owner, Owners, Trusted, is_from_here, is_trusted
from app.page.pdf import text_of_pdf
from app.page.race import ROUNDS
from app.page.settings import How
from app.page.tools import Answer
from app.page.turns import while_shown
from app.store import NoSuchChat, StoreError, Turn
from speculation.registry import RegistryError

IMPORTED = 20  # chats, after which the progress is told
Json = dict[str, Any]

router = APIRouter(prefix="/page", route_class=Limited, tags=["page"])


def add_routes(app: FastAPI, chats: Chats, owners: Owners) -> None:
    answer_errors(app, {StoreError: 507, NoSuchChat: 404, RegistryError: 500})
    app.state.chats, app.state.owners = chats, owners
    app.include_router(router)
    # Its body may have as many values as it likes: another process reads it.
    app.add_api_route("/page/import", import_chats, methods=["POST"])


class GivenFile(BaseModel):
    """A file of a message: its text, a PDF, or which of the edited message's files it is."""

    name: str = ""
    text: str = ""
    leads: bool = True
    pdf: Base64Bytes = b""
    kept: int | None = None


def _chats(http: Request) -> Chats:
    chats: Chats = http.app.state.chats
    return chats


Settings = Annotated[Json | None, Body(embed=True)]


def _ask(http: Request, owner: Owner, settings: Settings = None) -> Ask:
    return Ask(owner, settings, is_trusted(http, owner))


Of = Annotated[Chats, Depends(_chats)]
Asked = Annotated[Ask, Depends(_ask)]
TurnId = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, Body()]
Limit = Annotated[int, Query(ge=1, le=500)]
Methods = Annotated[tuple[str, str], Body()]
Arguments = Annotated[dict[str, str], Body()]
Rounds = Annotated[int, Body(ge=1, le=20)]
FromBody = Body(embed=True)


@router.get("/state")
async def state(http: Request, chats: Of) -> Response:
    made = Response()
    owner: str = http.app.state.owners.ensure_cookie(http, made)
    found: Json = {"owner": owner, "status": chats.news.told(), "seq": chats.feed.seq}
    presets = await chats.kept.transaction(lambda store: store.presets(owner))
    found["methods"] = [asdict(method) for method in chats.backend.methods()]
    answer = as_json({**found, "presets": list(map(asdict, presets)), "notice": chats.kept.notice})
    answer.raw_headers += [one for one in made.raw_headers if one[0] == b"set-cookie"]
    return answer


@router.get("/events")
async def events(http: Request, owner: Owner, chats: Of, after: str = "") -> Response:
    chats.news.watch()
    last = http.headers.get("last-event-id", after)
    chunks = chats.feed.events(owner, int(last) if last.isdecimal() else None)
    if "gzip" not in http.headers.get("accept-encoding", ""):
        return EventStream(chunks)
    return EventStream(_compressed(chunks), {"content-encoding": "gzip"})


# Chats


@router.get("/chats")
async def list_chats(
    owner: Owner, chats: Of, before: str | None = None, limit: Limit = 100
) -> Response:
    found = await chats.kept.transaction(
        lambda store: store.chats(owner, before=before, limit=limit)
    )
    return as_json({"chats": [chats.as_json(chat) for chat in found]})


@router.get("/search")
async def search(owner: Owner, chats: Of, q: str) -> Response:
    hits, n = await asyncio.wrap_future(chats.kept.search(owner, q))
    told = [
        {
            "chat": chats.as_json(hit.chat),
            "turn": hit.turn,
            "snippet": re.split("[\x02\x03]", hit.snippet),
        }
        for hit in hits
    ]
    return as_json({"hits": told, "n": n})


@router.post("/chats")
async def new_chat(
    owner: Owner, chats: Of, settings: Settings = None, incognito: Annotated[bool, Body()] = False
) -> Response:
    chats.settings(settings or {})
    return as_json(await chats.new(owner, settings or {}, incognito=incognito))


@router.get("/chats/{chat}")
async def open_chat(
    owner: Owner, chats: Of, chat: str, before: TurnId | None = None, limit: Limit = MOST_TURNS
) -> Response:
    return as_json(await chats.open(owner, chat, before, limit))


@router.patch("/chats/{chat}")
async def change_chat(
    owner: Owner,
    chats: Of,
    chat: str,
    title: Annotated[str | None, Body()] = None,
    is_pinned: Annotated[bool | None, Body()] = None,
    settings: Settings = None,
) -> Response:
    chats.settings(settings or {})
    changed: Json = {"title": title, "is_pinned": is_pinned, "settings": settings}
    return as_json(
        await chats.change(chat, lambda store: store.change_chat(chat, owner, **changed))
    )


@router.delete("/chats/{chat}")
async def delete_chat(owner: Owner, chats: Of, chat: str) -> Response:
    await chats.delete(owner, chat)
    return as_json({})


@router.post("/chats/{chat}/restore")
async def restore_chat(owner: Owner, chats: Of, chat: str) -> Response:
    return as_json(await chats.change(chat, lambda store: store.restore_chat(chat, owner)))


@router.post("/chats/{chat}/duplicate")
async def duplicate(
    owner: Owner, chats: Of, chat: str, turn: Annotated[TurnId, FromBody]
) -> Response:
    return as_json(await chats.duplicate(owner, chat, turn))


@router.get("/chats/{chat}/export")
async def export_chat(
    owner: Owner, chats: Of, chat: str, kind: Annotated[str, Query(alias="format")] = "json"
) -> Response:
    kept = chats.store_of(chat)
    title = (await kept.transaction(lambda kept: kept.chat(chat, owner))).title
    name = " ".join(re.sub(r"[^\w.-]+", " ", title).split())[:60] or "chat"
    if kind == "md":
        text = await kept.transaction(lambda kept: kept.as_markdown(chat, owner))
        return _download(iter([text]), f"{name}.md", "text/markdown")
    return _download(kept.export_json(owner, chat), f"{name}.json", "application/json")


@router.get("/export")
async def export(owner: Owner, chats: Of) -> Response:
    return _download(chats.kept.export_json(owner), "chats.json", "application/json")


# Turns


@router.post("/chats/{chat}/messages")
async def message(
    http: Request,
    ask: Asked,
    chats: Of,
    chat: str,
    text: Text = "",
    files: Annotated[Sequence[GivenFile], Body()] = (),
    parent: Annotated[TurnId | None, Body()] = LEAF,
) -> Response:
    read = await while_connected(http, _files(files, (), chats.apart))
    return as_json(await chats.message(ask, chat, _said(text), read, parent))


@router.post("/turns/{turn}/retry")
async def retry(
    ask: Asked, chats: Of, turn: TurnId, how: Annotated[How, Body()] = "again"
) -> Response:
    return as_json(await chats.retry(ask, turn, how))


@router.post("/turns/{turn}/continue")
async def proceed(ask: Asked, chats: Of, turn: TurnId) -> Response:
    return as_json(await chats.proceed(ask, turn))


@router.post("/turns/{turn}/edit")
async def edit(
    http: Request,
    ask: Asked,
    chats: Of,
    turn: TurnId,
    text: Text = "",
    files: Annotated[Sequence[GivenFile] | None, Body()] = None,
) -> Response:
    read = None
    if files is not None:
        old = (await chats.turn(ask.owner, turn)).files
        read = await while_connected(http, _files(files, old, chats.apart))
    return as_json(await chats.edit(ask, turn, _said(text), read))


@router.post("/turns/{turn}/choose")
async def choose(owner: Owner, chats: Of, turn: TurnId) -> Response:
    return as_json(await chats.choose(owner, turn))


@router.post("/turns/{turn}/stop")
async def stop(owner: Owner, chats: Of, turn: TurnId) -> Response:
    await chats.turn(owner, turn)
    chats.jobs.stop(turn)
    return as_json({})


@router.delete("/turns/{turn}")
async def delete_turn(owner: Owner, chats: Of, turn: TurnId) -> Response:
    return as_json(await chats.delete_turn(owner, turn))


@router.post("/turns/{turn}/restore")
async def restore_turn(owner: Owner, chats: Of, turn: TurnId) -> Response:
    return as_json(await chats.restore_turn(owner, turn))


@router.get("/turns/{turn}/files/{number}")
async def read_file(owner: Owner, chats: Of, turn: TurnId, number: int) -> Response:
    files = (await chats.turn(owner, turn)).files
    if not 0 <= number < len(files):
        why = f"this message has {len(files)} files, and none with number {number}"
        raise ApiError(why, 404)
    return as_json(files[number])


@router.get("/turns/{turn}/steps")
async def read_steps(owner: Owner, chats: Of, turn: TurnId) -> Response:
    kept = await chats.store_of_turn(turn).transaction(lambda store: store.steps(turn, owner))
    with suppress(ValueError):  # an earlier version's import kept anything
        if kept is not None:
            shown = await while_shown(lambda: steps.shown(kept))
            return Response(shown, media_type="application/json")
    raise ApiError("the steps of this reply are not kept", 404)


# Tools


@router.get("/tools", dependencies=[Trusted])
async def list_servers(chats: Of) -> Response:
    servers = chats.servers
    return as_json({"file": str(servers.path), "servers": list(map(asdict, servers.states()))})


@router.post("/tools/{server}", dependencies=[Trusted])
async def start_server(
    chats: Of, server: str, again: Annotated[bool, FromBody] = False
) -> Response:
    """Start a server for its tools; or end and start it ``again``."""
    servers = chats.servers
    if all(one.name != server for one in servers.states()):
        raise ApiError(f"there is no server {server[:40]!r} in {servers.path}", 404)
    with suppress(ToolError):  # its state tells
        await (servers.restart(server) if again else servers.tools([server]))
    return await list_servers(chats)


@router.post("/tools/{server}/{kind}", dependencies=[Trusted])
async def offer(chats: Of, server: str, kind: Kind, own: Text, arguments: Arguments) -> Response:
    """The texts of a resource or a prompt."""
    texts = await chats.servers.read(server, kind, own, arguments)
    return as_json({"texts": [{"name": name, "text": text} for name, text in texts]})


@router.post("/turns/{turn}/calls/{number}")
async def answer_call(
    ask: Asked, chats: Of, turn: TurnId, number: TurnId, answer: Annotated[Answer, Body()]
) -> Response:
    return as_json(await chats.answer(ask, turn, number, answer))


@router.delete("/chats/{chat}/answers")
async def ask_again(owner: Owner, chats: Of, chat: str) -> Response:
    await chats.store_of(chat).transaction(lambda store: store.answers(chat, owner, {}))
    return as_json({})


# Races


@router.post("/turns/{turn}/race")
async def race_turn(
    ask: Asked, chats: Of, turn: TurnId, methods: Methods, rounds: Rounds = ROUNDS
) -> Response:
    return as_json({"race": await chats.race_turn(ask, turn, methods, rounds)})


@router.post("/race")
async def race_text(
    ask: Asked,
    chats: Of,
    prompt: Annotated[str, Body(min_length=1)],
    methods: Methods,
    rounds: Rounds = ROUNDS,
) -> Response:
    said = Turn(0, "", None, "user", prompt)
    return as_json({"race": chats.race(ask, [said], methods, rounds)})


@router.delete("/races/{race}")
async def stop_race(owner: Owner, chats: Of, race: str) -> Response:
    chats.races.stop(owner, race)
    return as_json({})


# What the server does


@router.get("/requests")
async def requests(http: Request, owner: Owner, chats: Of) -> Response:
    """The last requests for text, the newest first, and what is known of drafts. Who shares the
    server sees the own ones alone, unless it has no keys and this is its machine."""
    sees_all = not owner or (not memory_of(http) and is_from_here(http))
    kept = current_call().latest
    latest = [one for one in kept if sees_all or one.owner == owner]
    drafting, model = chats.backend.report().drafting, chats.backend.status().model
    is_known = model is not None and model.load == drafting.load
    told = asdict(drafting) if is_known else None
    found = [{**one.as_json(), "has_texts": _has_texts(one, owner)} for one in latest]
    keeps = owner in kept.readers
    return as_json({"requests": found, "keeps_texts": keeps, "drafting": told})


@router.post("/requests/texts")
async def keep_texts(owner: Owner, keeps: Annotated[bool, FromBody]) -> Response:
    latest = current_call().latest
    (latest.readers.add if keeps else latest.readers.discard)(owner)
    for one in latest:
        one.texts = one.texts if keeps or one.owner != owner else None
    return as_json({})


@router.get("/requests/{number}")
async def request_texts(owner: Owner, number: TurnId) -> Response:
    for one in current_call().latest:
        if one.as_json()["id"] == number and _has_texts(one, owner):
            return as_json(one.texts)
    raise ApiError("the texts of this request are not kept", 404)


# Presets


@router.post("/presets")
async def save_preset(
    owner: Owner,
    chats: Of,
    name: Annotated[str, Body(min_length=1, max_length=200)],
    settings: Annotated[Json, Body()],
) -> Response:
    chats.settings(settings)
    saved = await chats.kept.transaction(lambda store: store.save_preset(owner, name, settings))
    return as_json(asdict(saved))


@router.delete("/presets")
async def delete_preset(
    owner: Owner, chats: Of, preset: Annotated[TurnId, Body(embed=True, alias="id")]
) -> Response:
    await chats.kept.transaction(lambda store: store.delete_preset(owner, preset))
    return as_json({})


async def import_chats(http: Request, owner: Owner, chats: Of) -> Response:
    try:
        read = await while_connected(http, chats.apart.read(chats_of, await http.body()))
    except Unreadable as error:
        raise ApiError(f"Cannot import this file: {error}.") from error
    told: Json = {"chats": [], "n_known": 0, "refused": []}
    for n in range(0, len(read), IMPORTED):
        chats.feed.publish(owner, "import", {"done": n, "total": len(read)})
        found = await asyncio.to_thread(chats.add, owner, read[n : n + IMPORTED])
        told["chats"] += [chats.tell(chat) for chat in found.chats]
        told["n_known"] += found.n_known
        told["refused"] += found.refused
    return as_json(told)


def _has_texts(call: Call, owner: str) -> bool:
    """Whether the texts of an own request are kept, and it has ended."""
    return bool(call.texts) and call.owner == owner


async def _compressed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, compressed one by one: what is sent again while a block grows then costs next to
    nothing."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    async for chunk in chunks:
        yield packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH)


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
    given: Sequence[GivenFile], old: tuple[Mapping[str, Any], ...], apart: Apart
) -> list[Mapping[str, Any]]:
    """The files as they are kept; ``old`` are those of the edited message."""
    found: list[Mapping[str, Any]] = []
    for number, file in enumerate(given):
        if file.kept is None:
            text = file.text
            if file.pdf:
                try:
                    text = "\n\n".join(await apart.read(text_of_pdf, file.pdf))
                except Unreadable as error:
                    why = f"{file.name} cannot be read as a PDF: {error}"
                    raise ApiError(why, param=f"files[{number}]") from error
            found.append({"name": file.name, "text": text, "leads": file.leads})
        elif 0 <= file.kept < len(old):
            found.append(old[file.kept])
        else:
            raise ApiError(f"the message has no file {file.kept}", param=f"files[{number}].kept")
    return found
