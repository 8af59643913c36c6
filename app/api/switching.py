"""Which model answers a call. Loads another one when a call names it, and frees one that is idle.

Calls take their turn. One that names another model waits until the calls before it have ended, and
those after it wait for it, so none waits for ever. Everything happens in the server's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import ApiError
from app.api.replies import last_event
from app.worker.backend import Backend
from app.worker.messages import Event, Failed, ModelSpec, Unload
from app.worker.wording import failure
from speculation.registry import PAIRED, ModelEntry, is_local
from speculation.registry.local import known_models

KNOWN_SECONDS = 10.0  # for which the list of models holds
POLL_SECONDS = 0.05  # between two looks at somebody else's load
_HELD = "held models"  # in a call's scope: what it releases at its end


class Models:
    """The models that calls can name, and the calls that use the loaded one."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec | None = None,
        *,
        alias: str = "",
        switches: bool = False,
        idle_seconds: float | None = None,
    ) -> None:
        """``spec`` is the model that the server began with, ``alias`` its name. ``switches``: load
        the model that a call names. ``idle_seconds``: free one that no call has used for so long.
        """
        self.switches = switches
        self.is_asleep = False  # the model was freed because nobody used it
        self._backend, self._first, self._alias = backend, spec or ModelSpec(), alias
        self._last = self._first.model  # the one that was loaded last
        self._idle_seconds = idle_seconds
        self._n_users = 0
        self._unused = asyncio.Event()  # while there are no users
        self._unused.set()
        self._gate = asyncio.Lock()  # which calls pass in order
        self._task: asyncio.Task[Event] | None = None  # a load or unload
        self._timer: asyncio.TimerHandle | None = None
        self._known: tuple[float, dict[str, ModelEntry]] = (0.0, {})

    def name(self, model: str) -> str:
        """A model's name in answers."""
        is_first = not self.switches or model == self._first.model
        return self._alias if self._alias and is_first else Path(model).name

    async def take(self, asked: str | None, http: Request) -> None:
        """Wait for the model that a call names, which keeps it until the call has ended.

        Unknown names select the loaded model. Raises ApiError if another one cannot be loaded.
        """
        wanted, is_named = await self._wanted(asked)
        if self.switches and is_named:
            await self._end_of_load()
        status = self._backend.status()
        is_loading = self._task is None and status.loading is not None
        has_begun = status.model is not None or status.error is not None or self.is_asleep
        holds = http.scope.get(_HELD)
        if not (self.switches or self._idle_seconds) or holds is None or holds:
            return  # nothing is switched, or this call holds a model already
        if is_loading or not (has_begun or self._task):
            return  # somebody else loads a model: this call will hear of it
        await self._turn(wanted, holds)

    async def others(self) -> list[dict[str, Any]]:
        """The models beside the loaded one, for a list of models."""
        current, known = self._current(), await self._models()
        states = {name: is_local(entry) for name, entry in known.items() if name != current}
        if self._first.model != current:
            is_here = states.pop(self._first.model, Path(self._first.model).is_file())
            states = {self.name(self._first.model): is_here, **states}
        return [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "speculation",
                "status": {"value": "unloaded" if is_here else "not downloaded"},
            }
            for name, is_here in states.items()
        ]

    def _current(self) -> str | None:
        model = self._backend.status().model
        return None if model is None else model.spec.model

    async def _models(self) -> dict[str, ModelEntry]:
        read_at, known = self._known
        if time.monotonic() - read_at > KNOWN_SECONDS or not known:
            known = await asyncio.to_thread(known_models)
            self._known = time.monotonic(), known
        return known

    async def _wanted(self, asked: str | None) -> tuple[str, bool]:
        """The model that a call gets for a name, and whether the name is that model's.

        Raises ApiError.
        """
        current = self._current() or self._last
        if not asked or asked in (current, Path(current).name):
            return current, bool(asked)
        if asked in (self._alias, self._first.model, Path(self._first.model).name):
            return self._first.model if self.switches else current, True
        known = await self._models()
        entry = known.get(asked)
        if entry is None:
            by_file = [name for name in known if Path(name).name == asked]
            return (by_file[0], True) if by_file and self.switches else (current, False)
        why = ""
        if not self.switches:
            why = f"{asked} is not loaded; this server has {Path(current).name}. Start it with "
            why += (
                f"--model {asked}, or with --switch-models to load models when they are asked for"
            )
        elif not is_local(entry):
            why = f"{asked} is not on this machine; `speculation models {asked}` downloads it"
        if why:
            raise ApiError(why, 404, param="model", code="model_not_found")
        return asked, True

    async def _end_of_load(self) -> None:
        """Wait until nobody else loads a model."""
        while self._task is None and self._backend.status().loading is not None:
            await asyncio.sleep(POLL_SECONDS)

    async def _turn(self, model: str, holds: list[Callable[[], None]]) -> None:
        """Wait for the turn of a call for ``model``, whose end is added to ``holds``.

        Raises ApiError if it cannot be loaded.
        """
        try:
            async with self._gate:
                while self._task is not None or model != self._current():
                    if self._task is not None:  # which goes on if this client leaves
                        await asyncio.wait([self._task])
                        continue
                    await self._unused.wait()
                    if model != self._current():
                        self._task = asyncio.ensure_future(self._load(model))
                        last = await asyncio.shield(self._task)
                        if isinstance(last, Failed):
                            raise ApiError.of(last)
                self._n_users += 1
                self._unused.clear()
                holds.append(self._release)
        finally:
            self._rest()

    def _release(self) -> None:
        """A call has ended."""
        self._n_users -= 1
        if not self._n_users:
            self._unused.set()
        self._rest()

    def _rest(self) -> None:
        """Free the model later, if nobody uses it until then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        is_idle = not (self._n_users or self._gate.locked() or self._task or self.is_asleep)
        if is_idle and self._idle_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._idle_seconds, self._begin_unload)

    async def _load(self, model: str) -> Event:
        try:
            last = await last_event(self._backend.load(self._spec(model)))
            if not isinstance(last, Failed):
                self._last, self.is_asleep = model, False
            return last
        except Exception as error:  # such as a system without another process
            return failure(error)
        finally:
            self._task = None
            self._rest()

    def _spec(self, model: str) -> ModelSpec:
        """How to load a model: as the first one, but for what belongs to that alone."""
        if model == self._first.model:
            return self._first
        entry = self._known[1].get(model)
        has_draft = self._first.draft_model == PAIRED and entry is not None and entry.draft
        has_heads = self._first.heads == (PAIRED,) and entry is not None and entry.heads
        return replace(
            self._first,
            model=model,
            draft_model=PAIRED if has_draft else None,
            heads=(PAIRED,) if has_heads else (),
            chat_template=None,
        )

    def _begin_unload(self) -> None:
        self._timer = None
        if self._current() is not None and self._task is None:
            self._task = asyncio.ensure_future(self._unload())

    async def _unload(self) -> Event:
        try:
            self._last = self._current() or self._last
            last = await last_event(self._backend.ask(Unload()))
            self.is_asleep = not isinstance(last, Failed)
            return last
        finally:
            self._task = None


class HoldModels:
    """ASGI middleware: a call keeps its model until its answer, or its stream, has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holds: list[Callable[[], None]] = []
        try:
            await self._app({**scope, _HELD: holds}, receive, send)
        finally:
            for release in holds:
                release()
