"""Calls that name models: who waits for whom, and which model is loaded when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from app.api import switching
from app.api.errors import ApiError
from app.api.replies import while_connected
from app.api.switching import HoldModels, Models
from app.start import parse_flags
from app.worker.events import Events
from app.worker.messages import Answer, Failed, Loaded, Loading, ModelSpec, Question, Status, Unload
from speculation.registry import ModelEntry
from tests.support.fake_backend import MODEL, FakeBackend, played
from tests.support.waiting import until

HERE = Path(__file__)  # any file, for models that are on this machine


class Switching(FakeBackend):
    """Loads at once, and notes what it did."""

    def __init__(self, loaded: str = "a") -> None:
        super().__init__()
        self.done: list[str] = []
        self.loads: Loading | None = None  # for the page
        self.is_full = False  # the next load cannot begin
        self._loaded: str | None = loaded

    def status(self) -> Status:
        if self._loaded is None:
            return Status()
        return Status(replace(MODEL, spec=ModelSpec(self._loaded)), self.loads)

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        self.done.append(f"load {spec.model}")
        if spec.model == "bad":
            return played([Failed("it is bad", "it is bad", "no model")])
        if self.is_full:
            self.is_full = False
            raise OSError(24, "Too many open files")
        self._loaded = spec.model
        return played([Loaded(MODEL)])

    def ask(self, question: Question) -> Events:
        assert question == Unload()
        self.done.append("unload")
        self._loaded = None
        return played([Answer()])


class Call:
    """A call that names a model; ``end`` ends it, and ``leave`` is its client going away."""

    def __init__(self, models: Models, name: str | None, backend: Switching) -> None:
        self._end, self._left = asyncio.Event(), asyncio.Event()
        self._models, self._name, self._backend = models, name, backend
        self.model: str | None = None  # that answers
        self.end, self.leave = self._end.set, self._left.set
        self.task = asyncio.ensure_future(HoldModels(self._answer)({}, self._receive, self._send))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        http = Request({"type": "http", **scope}, receive)
        await while_connected(http, self._models.take(self._name, http))
        model = self._backend.status().model
        self.model = None if model is None else model.spec.model
        await self._end.wait()

    async def _receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None: ...


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict.fromkeys(("b", "c", "bad"), HERE) | {"far": Path("/nowhere/far.gguf")}
    found = {name: ModelEntry(name, path, None, "") for name, path in names.items()}
    monkeypatch.setattr(switching, "known_models", lambda: found)


async def settled() -> None:
    for _ in range(5):  # reading the known models takes a thread
        await asyncio.sleep(0.02)


async def ended(*calls: Call) -> None:
    for one in calls:
        one.end()
    await asyncio.gather(*(one.task for one in calls))


Asking = Callable[[str | None], Call]


def run(test: Callable[[Switching, Asking], Awaitable[None]], **models: Any) -> list[str]:
    """What the backend did while ``test`` made its calls."""
    backend = Switching()

    async def calls() -> None:
        made = Models(backend, ModelSpec("a"), **{"switches": True, **models})
        await test(backend, lambda name: Call(made, name, backend))

    asyncio.run(asyncio.wait_for(calls(), 60))
    return backend.done


def test_a_call_for_another_model_waits_for_those_before_it_and_holds_up_those_after() -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        first, unnamed = call("a"), call(None)
        await until(lambda: first.model == unnamed.model == "a")
        other = call("b")
        await settled()
        late, unknown = call("a"), call("gpt-4o")
        await settled()
        assert (other.model, late.model, backend.done) == (None, None, [])
        await ended(first, unnamed)
        await until(lambda: other.model is not None)
        await settled()
        assert (other.model, late.model, backend.done) == ("b", None, ["load b"])
        other.end()
        await until(lambda: late.model == "a")
        await ended(late, other, unknown)

    assert run(calls) == ["load b", "load a"]


def test_a_client_that_leaves_and_a_model_that_fails_hold_up_nobody() -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        first = call("a")
        await until(lambda: first.model == "a")
        leaving, bad, last = call("c"), call("bad"), call("b")
        await settled()
        leaving.leave()
        await settled()
        first.end()
        for one, reason in ((leaving, "the client has gone"), (bad, "it is bad")):
            with pytest.raises(ApiError, match=reason):
                await one.task
        await until(lambda: last.model == "b")
        await ended(last)

    assert run(calls) == ["load bad", "load b"]


@pytest.mark.parametrize("n_turns", range(8))  # of the event loop, from the load on
def test_a_client_that_leaves_just_as_its_load_fails_holds_up_nobody(n_turns: int) -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        first = call("a")
        await until(lambda: first.model == "a")
        bad, last = call("bad"), call("b")
        await settled()
        first.end()
        while "load bad" not in backend.done:
            await asyncio.sleep(0)
        for _ in range(n_turns):
            await asyncio.sleep(0)
        bad.task.cancel()
        with pytest.raises((asyncio.CancelledError, ApiError)):
            await bad.task
        await until(lambda: last.model == "b")
        await ended(last)

    assert run(calls) == ["load bad", "load b"]


def test_a_load_that_cannot_begin_is_told_once() -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        backend.is_full = True
        with pytest.raises(ApiError, match="Too many open files"):
            await call("c").task
        after = call("b")
        await until(lambda: after.model == "b")
        await ended(after)

    assert run(calls) == ["load c", "load b"]


def test_a_call_that_names_a_model_waits_for_the_load_of_another_one_by_the_page() -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        backend.loads = Loading("c", "load", 5, 100)
        same, other, unnamed, unknown = call("a"), call("b"), call(None), call("gpt-4o")
        await until(lambda: unnamed.model == unknown.model == "a")  # they hear of the load
        backend._loaded, backend.loads = "c", None

        async def answered_by(one: Call, model: str) -> None:
            await until(lambda: one.model is not None)
            assert one.model == model
            one.end()

        await asyncio.gather(answered_by(same, "a"), answered_by(other, "b"))
        await ended(same, other, unnamed, unknown)

    assert sorted(run(calls)) == ["load a", "load b"]


def test_a_model_that_is_not_here_is_named_with_the_way_to_get_it() -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        with pytest.raises(ApiError, match="`speculation models far` downloads it"):
            await call("far").task
        models = Models(backend, ModelSpec("a"))
        with pytest.raises(ApiError, match="b is not loaded; this server has a. Start it with"):
            await Call(models, "b", backend).task
        unknown = Call(models, "gpt-4o", backend)
        await until(lambda: unknown.model == "a")
        await ended(unknown)

    assert run(calls) == []


def test_an_idle_model_is_freed_and_the_next_call_loads_it() -> None:
    async def calls(backend: Switching, call: Asking) -> None:
        first = call(None)
        await until(lambda: first.model == "a")
        await asyncio.sleep(0.1)  # more than the idle seconds
        assert backend.done == []  # it is used
        await ended(first)
        await until(lambda: first._models.is_asleep)
        assert backend.done == ["unload"]
        second = call("gpt-4o")
        await until(lambda: second.model == "a")
        assert not first._models.is_asleep
        await ended(second)

    assert run(calls, idle_seconds=0.05, switches=False)[:2] == ["unload", "load a"]


def test_a_page_keeps_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--unload-after", "5"], ["--no-page", "--unload-after", "0"]):
        with pytest.raises(SystemExit):
            parse_flags(flags)
        assert "give seconds above 0, and only to serve without the page" in capsys.readouterr().err
    assert parse_flags(["--no-page", "--unload-after", "5"]).unload_after == 5


def test_the_list_has_the_other_models_and_whether_they_are_here() -> None:
    async def listed(backend: Switching, switches: bool) -> dict[str, str]:
        models = Models(backend, ModelSpec(str(HERE)), alias="mine", switches=switches)
        return {one["id"]: one["status"]["value"] for one in await models.others()}

    here = {"b": "unloaded", "c": "unloaded", "bad": "unloaded", "far": "not downloaded"}
    assert asyncio.run(listed(Switching(str(HERE)), False)) == here
    del here["b"]
    assert asyncio.run(listed(Switching("b"), True)) == {"mine": "unloaded", **here}
    gone = Models(Switching("b"), ModelSpec("/nowhere/x.gguf"), switches=True)
    (first, *_) = asyncio.run(gone.others())
    assert (first["id"], first["status"]["value"]) == ("x.gguf", "not downloaded")
