"""The backend on a tiny model: replies, loads, waiting and their events."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from app.worker.loading import threads_beside_browser
from app.worker.messages import (
    Answer,
    ChatRequest,
    Done,
    Event,
    Failed,
    Loaded,
    Loading,
    ModelSpec,
    Prefill,
    Status,
    Steps,
    Tokenize,
    Tokens,
    Waiting,
)
from app.worker.serving import LARGE, THREADS
from app.worker.wire import written
from batching.gguf.reader import fingerprint
from batching.llama.context import ContextParams
from batching.llama.hardware import physical_cores
from batching.watched import checkpoint
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.engine import Engine
from speculation.registry import PAIRED
from tests.support.hub_server import HubServer
from tests.support.local_backend import LocalBackend
from tests.support.tiny_gguf import write_tiny_gguf

ENDLESS = {"grammar": "root ::= [a-z] root"}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for a reply long enough to be stopped."""
    return write_tiny_gguf(tmp_path_factory.mktemp("long") / "long.gguf", n_ctx=32768)


def spec(path: Path | str, n_ctx: int = 0, parallel: int = 1) -> ModelSpec:
    return ModelSpec(str(path), n_ctx, n_threads=1, flash_attn="off", parallel=parallel)


@pytest.fixture
def fresh() -> Iterator[LocalBackend]:
    """A backend without a model."""
    made = LocalBackend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def loaded(long_model: Path) -> Iterator[LocalBackend]:
    made = LocalBackend()
    assert isinstance(list(made.load(spec(long_model, 32768)))[-1], Loaded)
    yield made
    made.close()


@pytest.fixture
def backend(loaded: LocalBackend, long_model: Path) -> LocalBackend:
    """An idle backend with the long model loaded."""
    model = loaded.status().model
    assert model is not None
    assert model.spec.model == str(long_model)
    return loaded


def request(text: str, id_: str = "tab", **options: Any) -> ChatRequest:
    return ChatRequest(id_, ({"role": "user", "content": text},), **options)


def text_of(events: Iterable[Event]) -> str:
    return "".join(
        text for event in events if isinstance(event, Tokens) for text, _ in event.pieces
    )


def test_a_reply_is_what_the_engine_says(backend: LocalBackend, long_model: Path) -> None:
    events = list(backend.reply(request("a cat", max_tokens=20)))
    params = ContextParams(n_ctx=32768, n_threads=1, flash_attn="off")
    with Engine.load(long_model, params) as engine:
        expected = engine.chat("a cat", max_tokens=20).run().text
    done = events[-1]
    assert isinstance(done, Done)
    assert (text_of(events), done.n_tokens, done.method) == (expected, 20, "auto")
    assert isinstance(events[0], Prefill)


def test_characters_that_span_tokens_arrive_whole(backend: LocalBackend) -> None:
    sampling = {"grammar": 'root ::= "naïve 漢字 😀!"'}
    for method in ("ar", "prompt-lookup"):
        events = list(backend.reply(request("hi", method=method, sampling=sampling)))
        assert text_of(events) == "naïve 漢字 😀!"
        assert all("\ufffd" not in text_of([event]) for event in events)


def test_the_steps_of_a_reply_come_with_its_tokens_if_they_are_asked_for(
    backend: LocalBackend,
) -> None:
    sampling = {"grammar": 'root ::= "a😀"'}
    asked = request("a", method="prompt-lookup", sampling=sampling, record=True)
    events = list(backend.reply(asked))
    *_, done = events
    assert isinstance(done, Done)
    kinds = [type(event) for event in events if isinstance(event, Steps | Tokens)]
    assert kinds[::2] == [Steps] * (len(kinds) // 2)
    records = [one for event in events if isinstance(event, Steps) for one in event.records]
    assert len(records) == done.n_steps
    pieces: list[str] = []
    for record in records:
        pieces += [record.nodes[node].piece for node in record.path]
        pieces += [record.bonus] * bool(record.bonus)
        assert {node.source for node in record.nodes} <= {"structure"}
    # A token by itself has a part of the character alone.
    assert "".join(pieces).startswith("a\ufffd\ufffd\ufffd\ufffd")
    assert sum(len(record.path) for record in records) == done.n_accepted > 0
    events = list(backend.reply(dataclasses.replace(asked, record=False)))
    assert not any(isinstance(event, Steps) for event in events)


def test_a_reply_that_is_stopped_or_abandoned_leaves_the_model_ready(
    backend: LocalBackend,
) -> None:
    for end in (lambda events: backend.stop("tab"), lambda events: events.close()):
        events = backend.reply(request("hi", sampling=ENDLESS))
        seen = [next(events)]
        while not isinstance(seen[-1], Tokens):
            seen.append(next(events))
        end(events)
        seen += events
        assert isinstance(seen[-1], Done)
        assert seen[-1].finish_reason == "cancelled"
        assert text_of(backend.reply(request("hi", max_tokens=5)))


def test_a_second_reply_waits_its_turn_and_says_so(backend: LocalBackend) -> None:
    first = backend.reply(request("hi", "one", sampling=ENDLESS))
    next(first)
    second = backend.reply(request("ho", "two", max_tokens=3))
    assert next(second) == Waiting(1)
    third = backend.reply(request("he", "three"))
    assert next(third) == Waiting(2)
    backend.stop("three")
    assert list(third) == [Done("cancelled", "auto")]
    backend.stop("one")
    assert isinstance(list(second)[-1], Done)
    assert isinstance(list(first)[-1], Done)


def test_as_many_replies_as_there_are_places_run_at_once(tiny_model: Path) -> None:
    backend = LocalBackend()
    assert isinstance(list(backend.load(spec(tiny_model, parallel=2)))[-1], Loaded)
    running = []
    for i, first in enumerate((Prefill(0, 5), Prefill(5, 5), Waiting(1))):
        running.append(backend.reply(request("hi", str(i), sampling=ENDLESS)))
        assert next(running[i]) == first
    for event in running[0]:  # noqa: B007
        backend.stop("0")
    assert isinstance(event, Done)
    assert isinstance(next(running[2]), Prefill)
    assert backend.close()


class Held:
    """A place where a thread waits until it may go on."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, result: Any = None, *_: Any, **__: Any) -> Any:
        self.reached.set()
        assert self.go.wait(60)
        return result


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go.set()


def test_without_a_model_replies_wait_for_its_load_and_nothing_else_does(
    fresh: LocalBackend, long_model: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.worker.loading.resolve", lambda model, **_: held(Path(model)))
    load = fresh.load(spec(long_model, 512))
    assert held.reached.wait(60)
    reply, stopped = (fresh.reply(request("hi", id_, max_tokens=2)) for id_ in ("one", "two"))
    assert next(reply) == Waiting(1, loading=True)
    assert fresh.report().n_waiting == 2
    fresh.stop("two")
    assert list(stopped) == [Waiting(2, loading=True), Done("cancelled", "auto")]
    (failed,) = fresh.ask(Tokenize("a cat"))
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.message[:29]) == ("no model", "the model is being loaded; tr")
    assert fresh.status().loading == Loading(str(long_model), "load", 0, 100)
    held.go.set()
    assert isinstance(list(load)[-1], Loaded)
    assert isinstance(list(reply)[-1], Done)
    assert fresh.report().n_waiting == 0


def test_the_loaded_model_goes_on_while_another_is_downloaded_or_waits(
    fresh: LocalBackend,
    long_model: Path,
    tiny_model: Path,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list(fresh.load(spec(long_model, 32768, parallel=2)))
    monkeypatch.setattr("app.worker.loading.resolve", lambda model, **_: held(Path(model)))
    load = fresh.load(spec(tiny_model))
    assert held.reached.wait(60)
    assert isinstance(list(fresh.reply(request("hi", max_tokens=2)))[-1], Done)
    running = fresh.reply(request("hi", "running", sampling=ENDLESS, method="ar"))
    assert isinstance(next(running), Prefill)
    monkeypatch.setattr("app.worker.serving.HOLD_SECONDS", 1.0)
    held.go.set()
    while not isinstance(next(load), Waiting):  # for the running reply
        pass
    (answer,) = fresh.ask(Tokenize("a cat"))
    assert isinstance(answer, Answer)
    assert isinstance(list(fresh.reply(request("hi", max_tokens=2)))[-1], Done)
    while not fresh.serving._is_replacing:
        time.sleep(0.01)
    after = fresh.reply(request("hi", "after", max_tokens=2))
    assert next(after) == Waiting(1, loading=True)
    fresh.stop("running")
    assert isinstance(list(running)[-1], Done)
    assert isinstance(list(load)[-1], Loaded)
    done = list(after)[-1]
    assert isinstance(done, Done) and done.model is not None
    assert done.model.spec == spec(tiny_model)


def test_what_is_prepared_ends_at_once_when_its_client_leaves(
    backend: LocalBackend, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.worker.serving.prepared", held)
    replies = [backend.reply(request("hi", str(i))) for i in range(3)]  # one more than threads
    assert held.reached.wait(60)
    for i, events in enumerate(replies):
        backend.stop(str(i))
        assert list(events) == [Done("cancelled", "auto")]
    held.go.set()
    monkeypatch.undo()
    assert isinstance(list(backend.reply(request("hi", max_tokens=2)))[-1], Done)


@pytest.mark.parametrize(
    ("lane", "asked"),
    [
        ("large", ChatRequest("x" * LARGE)),
        ("grammar", ChatRequest("", sampling={"json_schema": '{"pattern": "a"}'})),
        ("grammar", ChatRequest("", tools=({"parameters": {"$ref": "#"}},))),
        ("grammar", ChatRequest("x" * 2**16, tools=({"parameters": {"properties": {}}},))),
    ],
)
def test_requests_that_take_long_hold_up_no_others_and_end_with_their_clients(
    backend: LocalBackend,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    lane: str,
    asked: ChatRequest,
) -> None:
    def work(*_: Any) -> Any:
        held.reached.set()
        while not held.go.wait(0.01):
            checkpoint()

    monkeypatch.setattr("app.worker.serving.answer_to", work)
    slow = [
        backend.started(Tokenize("a"), body=written(1, asked)) for _ in range(THREADS[lane] + 1)
    ]
    assert held.reached.wait(60)
    assert isinstance(list(backend.reply(request("hi", max_tokens=2)))[-1], Done)
    for events in slow:
        events.close()
        assert list(events) == [Failed("the question was stopped")]
    while backend.serving._jobs:
        time.sleep(0.01)
    assert not held.go.is_set()


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_model_that_llama_cpp_would_abort_on_leaves_the_old_one_running(
    fresh: LocalBackend, tiny_model: Path, tmp_path: Path, is_draft: bool
) -> None:
    """It is refused before the old one is freed."""
    list(fresh.load(spec(tiny_model)))
    running = fresh.reply(request("hi", "running", sampling=ENDLESS))
    assert isinstance(next(running), Prefill)
    bad = write_tiny_gguf(tmp_path / "bad.gguf")
    bad.write_bytes(bad.read_bytes().replace("▁cat".encode(), b"\xe2\x96\x81a\0t"))
    wanted = spec(bad)
    if is_draft:
        wanted = dataclasses.replace(spec(tiny_model), draft_model=str(bad))
    failed = list(fresh.load(wanted))[-1]
    assert isinstance(failed, Failed) and "has a NUL byte, beside '▁a'" in failed.message
    fresh.stop("running")
    assert isinstance(list(running)[-1], Done)
    model = fresh.status().model
    assert model is not None and model.load == 1


def test_a_backend_closes_in_bounded_time_whatever_its_threads_do(
    tiny_model: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend()
    list(backend.load(spec(tiny_model)))
    monkeypatch.setattr("app.worker.loading.resolve", held)
    load = backend.load(spec(tiny_model))
    assert held.reached.wait(60)
    assert backend.serving.close(0.1) is False
    held.go.set()
    assert isinstance(list(load)[-1], Failed)
    assert backend.close() is True


def test_an_impossible_request_fails_with_a_reason(backend: LocalBackend) -> None:
    for options, reason in (
        ({"method": "lookahead:window=0"}, "window is 0; give 1 to 128"),
        ({"sampling": {"top_p": 3}}, "top_p is 3; give 0.0 to 1.0"),
        ({"sampling": {"grammar": "nonsense"}}, "the grammar does not parse"),
        ({"leave_out": False}, "shorten it, since the model was trained for 32768"),
    ):
        asked = request("a" * (40_000 if "leave_out" in options else 1), **options)
        failed = list(backend.reply(asked))[-1]
        assert isinstance(failed, Failed)
        assert reason in failed.message


def test_a_load_that_fails_says_why_and_leaves_the_old_model_usable(
    fresh: LocalBackend, tiny_model: Path, tmp_path: Path
) -> None:
    list(fresh.load(spec(tmp_path / "none.gguf")))
    (failed,) = fresh.reply(request("hi"))
    assert isinstance(failed, Failed) and "no model is loaded" in failed.message
    assert "none.gguf" in failed.message and "none.gguf" in str(fresh.status().error)
    list(fresh.load(spec(tiny_model)))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:20_000])
    for wrong, reason in ((tmp_path / "none.gguf", "file not found"), (broken, "is incomplete")):
        failed = list(fresh.load(spec(wrong)))[-1]
        assert isinstance(failed, Failed)
        assert reason in failed.message
        status = fresh.status()
        assert status.error == failed.message
        assert status.model is not None
        assert status.model.spec.model == str(tiny_model)
        assert isinstance(list(fresh.reply(request("x", max_tokens=2)))[-1], Done)


def load_stopped_when(
    backend: LocalBackend, path: Path, is_time: Callable[[Loading], bool]
) -> list[Event]:
    """The events of a load that is stopped, in its own thread, when it says so."""
    take = backend.serving._send

    def take_and_stop(number: int, event: Any) -> None:
        take(number, event)
        if isinstance(event, Loading) and event.model == str(path) and is_time(event):
            backend.serving.cancel(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.serving, "_send", take_and_stop)
        return list(backend.load(spec(path)))


def test_a_load_that_is_stopped_restores_the_old_model(tiny_model: Path, long_model: Path) -> None:
    def reads_weights(event: Loading) -> bool:
        return event.stage == "load" and event.done > 0

    backend = LocalBackend()
    assert load_stopped_when(backend, long_model, reads_weights)[-1] == Failed(
        f"loading {long_model} was stopped"
    )
    assert backend.status() == Status()
    list(backend.load(spec(tiny_model)))
    events = load_stopped_when(backend, long_model, reads_weights)
    assert events[-1] == Failed(f"loading {long_model} was stopped")
    assert [e.model for e in events if isinstance(e, Loading)][-1] == str(tiny_model)
    model = backend.status().model
    assert model is not None and model.spec == spec(tiny_model)
    assert text_of(backend.reply(request("a cat", max_tokens=2)))
    backend.close()


def test_a_tiny_model_leaves_a_core_to_the_browser_and_a_large_one_uses_all() -> None:
    assert threads_beside_browser(15 * 10**6, 8) == 7
    assert threads_beside_browser(15 * 10**6, 2) == 1
    assert threads_beside_browser(15 * 10**6, 1) == 1
    assert threads_beside_browser(5 * 10**8, 2) == 2


@pytest.mark.parametrize(("asked", "n_threads"), [(3, 3), (None, max(1, physical_cores() - 1))])
def test_the_number_of_threads_is_as_requested_or_suits_the_model(
    fresh: LocalBackend, tiny_model: Path, asked: int | None, n_threads: int
) -> None:
    list(fresh.load(ModelSpec(str(tiny_model), n_threads=asked, flash_attn="off")))
    assert fresh.serving._engine().context.n_threads == n_threads


def test_the_draft_model_paired_in_models_txt_is_loaded(fresh: LocalBackend) -> None:
    paired = dataclasses.replace(spec("bundled", 512), draft_model=PAIRED)
    assert isinstance(list(fresh.load(paired))[-1], Loaded)
    events = list(fresh.reply(request("Hello!", method="draft", max_tokens=8)))
    assert isinstance(events[-1], Done)


def test_batches_are_traced(tiny_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    backend = LocalBackend(trace_batches=trace)
    list(backend.load(spec(tiny_model)))
    n_measured = len(trace.read_text().splitlines())
    list(backend.reply(request("x", max_tokens=3, method="ar")))
    backend.close()
    lines = trace.read_text().splitlines()[n_measured:]
    assert len(lines) == 3  # a step for each token, the first with the prompt
    assert json.loads(lines[-1])


def test_a_memory_file_is_for_the_first_model(tiny_model: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "memory", write_tiny_gguf(tmp_path / "other.gguf", n_layer=1)
    backend = LocalBackend(memory=file)
    for path in (tiny_model, other, tiny_model):
        assert isinstance(list(backend.load(spec(path)))[-1], Loaded)
        list(backend.reply(request("x", max_tokens=3, method="suffix")))
    backend.close()
    owner = fingerprint(tiny_model)
    assert len(SuffixMemory.load(file, owner, n_vocab=10**6).index.tokens) > 3


def test_texts_are_kept_on_disk_if_wanted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.engine.texts_folder", lambda: tmp_path)
    for megabytes, n_files in ((0, 0), (10, 1)):
        backend = LocalBackend()
        list(backend.load(dataclasses.replace(spec(tiny_model, parallel=2), keep_texts=megabytes)))
        list(backend.reply(request("a cat " * 20, max_tokens=3)))
        backend.close()
        assert len([*tmp_path.glob("*.text")]) == n_files


def test_a_download_reports_progress_and_can_be_stopped(
    fresh: LocalBackend, tmp_path: Path
) -> None:

    def resolve(model: str, *, bar: Any) -> Path:
        made = bar(total=2_000_000_000, desc=model, unit="B")
        made.update(500_000_000)
        fresh.stop("tab/load")
        made.update(1)
        raise AssertionError("it was stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.worker.loading.resolve", resolve)
        events = list(fresh.load(ModelSpec("big"), "tab/load"))
    told = [event for event in events[:-1] if isinstance(event, Loading)]
    assert [(one.model, one.stage) for one in told] == [("big", "load"), ("big", "download")]
    assert told[1].done / told[1].total == 0.25
    assert events[-1] == Failed("loading big was stopped")


def test_a_hub_model_is_downloaded_with_progress_and_loaded(
    fresh: LocalBackend, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    content = tiny_model.read_bytes()
    with HubServer() as hub:
        hub.add("owner/repo", "tiny.gguf", content)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        events = list(fresh.load(spec("hf:owner/repo/tiny.gguf")))
        close_session()
    bytes_done = [e.done for e in events if isinstance(e, Loading) and e.stage == "download"]
    assert bytes_done == sorted(bytes_done)
    assert bytes_done[-1] == len(content)
    assert isinstance(events[-1], Loaded)
    assert isinstance(list(fresh.reply(request("x", max_tokens=2)))[-1], Done)
