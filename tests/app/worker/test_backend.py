"""The backend on a tiny model: replies, loads, waiting and their events."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from app.worker.loading import threads_beside_browser
from app.worker.messages import (
    Answer,
    ChatRequest,
    Done,
    Event,
    Failed,
    Loaded,
    LoadedModel,
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
from tests.support.hub_server import HubServer, use_hub
from tests.support.local_backend import LocalBackend
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.waiting import wait_until

ENDLESS = {"grammar": "root ::= [a-z] root"}


def spec(path: Path | str, n_ctx: int = 0, parallel: int = 1, **more: Any) -> ModelSpec:
    more = {"n_threads": 1, "flash_attn": "off", **more}
    return ModelSpec(str(path), n_ctx, parallel=parallel, **more)


@pytest.fixture
def fresh() -> Iterator[LocalBackend]:
    """A backend without a model."""
    made = LocalBackend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for a reply long enough to be stopped."""
    return write_tiny_gguf(tmp_path_factory.mktemp("long") / "long.gguf", n_ctx=32768)


@pytest.fixture(scope="module")
def backend(long_model: Path) -> Iterator[LocalBackend]:
    """An idle backend with the long model loaded."""
    made = LocalBackend()
    assert loads(made, spec(long_model, 32768))
    yield made
    made.close()


def request(text: str = "hi", id_: str = "tab", **options: Any) -> ChatRequest:
    return ChatRequest(id_, ({"role": "user", "content": text},), **options)


def loads(backend: LocalBackend, spec: ModelSpec) -> bool:
    return isinstance(list(backend.load(spec))[-1], Loaded)


def replies(backend: LocalBackend, request: ChatRequest) -> Done:
    *_, done = backend.reply(request)
    assert isinstance(done, Done), done
    return done


def endless(backend: LocalBackend, id_: str, **options: Any) -> Iterator[Event]:
    """A reply that runs until it is stopped, and has begun."""
    events = backend.reply(request("hi", id_, sampling=ENDLESS, **options))
    assert isinstance(next(events), Prefill)
    return events


def stop(backend: LocalBackend, id_: str, events: Iterator[Event]) -> None:
    backend.stop(id_)
    assert isinstance(list(events)[-1], Done)


def model_of(backend: LocalBackend) -> LoadedModel:
    model = backend.status().model
    assert model is not None
    return model


def failure(events: Iterable[Event]) -> Failed:
    *_, failed = events
    assert isinstance(failed, Failed), failed
    return failed


def until_tokens(events: Iterator[Event]) -> None:
    while not isinstance(next(events), Tokens):
        pass


def text_of(events: Iterable[Event]) -> str:
    said = (event for event in events if isinstance(event, Tokens))
    return "".join(text for event in said for text, _ in event.pieces)


BRIEF = request(max_tokens=2)


def test_a_reply_is_what_the_engine_says(backend: LocalBackend, long_model: Path) -> None:
    first, *events, done = backend.reply(request("a cat", max_tokens=20))
    params = ContextParams(n_ctx=32768, n_threads=1, flash_attn="off")
    with Engine.load(long_model, params) as engine:
        expected = engine.chat("a cat", max_tokens=20).run().text
    assert isinstance(first, Prefill) and isinstance(done, Done)
    assert (text_of(events), done.n_tokens, done.method) == (expected, 20, "auto")


def test_characters_that_span_tokens_arrive_whole(backend: LocalBackend) -> None:
    sampling = {"grammar": 'root ::= "naïve 漢字 😀!"'}
    for method in ("ar", "prompt-lookup"):
        events = list(backend.reply(request(method=method, sampling=sampling)))
        assert text_of(events) == "naïve 漢字 😀!"
        assert all("\ufffd" not in text_of([event]) for event in events)


def test_the_steps_of_a_reply_come_with_its_tokens_if_they_are_asked_for(
    backend: LocalBackend,
) -> None:
    sampling = {"grammar": 'root ::= "a😀"'}
    asked = request("a", method="prompt-lookup", sampling=sampling, record=True)
    *events, done = backend.reply(asked)
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
        events = backend.reply(request(sampling=ENDLESS))
        until_tokens(events)
        end(events)
        *_, done = events
        assert isinstance(done, Done) and done.finish_reason == "cancelled"
        assert text_of(backend.reply(request(max_tokens=5)))


def test_a_second_reply_waits_its_turn_and_says_so(backend: LocalBackend) -> None:
    first = endless(backend, "one")
    second = backend.reply(request("ho", "two", max_tokens=3))
    assert next(second) == Waiting(1)
    third = backend.reply(request("he", "three"))
    assert next(third) == Waiting(2)
    backend.stop("three")
    assert list(third) == [Done("cancelled", "auto")]
    stop(backend, "one", first)
    assert isinstance(list(second)[-1], Done)


def test_as_many_replies_as_there_are_places_run_at_once(
    fresh: LocalBackend, tiny_model: Path
) -> None:
    assert loads(fresh, spec(tiny_model, parallel=2))
    running = []
    for i, first in enumerate((Prefill(0, 5), Prefill(5, 5), Waiting(1))):
        running.append(fresh.reply(request("hi", str(i), sampling=ENDLESS)))
        assert next(running[i]) == first
    stop(fresh, "0", running[0])
    assert isinstance(next(running[2]), Prefill)
    assert fresh.close()


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


@pytest.fixture
def held_load(held: Held, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[Event]]:
    """Begins a load that waits for ``held`` once it looks for its model."""

    def load(backend: LocalBackend, spec: ModelSpec) -> Iterator[Event]:
        monkeypatch.setattr("app.worker.loading.resolve", lambda model, **_: held(Path(model)))
        events = backend.load(spec)
        assert held.reached.wait(60)
        return events

    return load


def test_without_a_model_replies_wait_for_its_load_and_nothing_else_does(
    fresh: LocalBackend, long_model: Path, held: Held, held_load: Callable[..., Iterator[Event]]
) -> None:
    load = held_load(fresh, spec(long_model, 512))
    reply, stopped = (fresh.reply(request("hi", id_, max_tokens=2)) for id_ in ("one", "two"))
    assert next(reply) == Waiting(1, loading=True)
    assert fresh.report().n_waiting == 2
    fresh.stop("two")
    assert list(stopped) == [Waiting(2, loading=True), Done("cancelled", "auto")]
    failed = failure(fresh.ask(Tokenize("a cat")))
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
    held_load: Callable[..., Iterator[Event]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert loads(fresh, spec(long_model, 32768, parallel=2))
    load = held_load(fresh, spec(tiny_model))
    assert replies(fresh, BRIEF)
    running = endless(fresh, "running", method="ar")
    monkeypatch.setattr("app.worker.serving.HOLD_SECONDS", 1.0)
    held.go.set()
    while not isinstance(next(load), Waiting):  # for the running reply
        pass
    (answer,) = fresh.ask(Tokenize("a cat"))
    assert isinstance(answer, Answer)
    assert replies(fresh, BRIEF)
    wait_until(lambda: fresh.serving._is_replacing)
    after = fresh.reply(request("hi", "after", max_tokens=2))
    assert next(after) == Waiting(1, loading=True)
    stop(fresh, "running", running)
    assert isinstance(list(load)[-1], Loaded)
    *_, done = after
    assert isinstance(done, Done) and done.model is not None
    assert done.model.spec == spec(tiny_model)


def test_what_is_prepared_ends_at_once_when_its_client_leaves(
    backend: LocalBackend, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.worker.serving.prepared", held)
    asked = [backend.reply(request("hi", str(i))) for i in range(3)]  # one more than threads
    assert held.reached.wait(60)
    for i, events in enumerate(asked):
        backend.stop(str(i))
        assert list(events) == [Done("cancelled", "auto")]
    held.go.set()
    monkeypatch.undo()
    assert replies(backend, BRIEF)


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
    body = written(1, asked)
    slow = [backend.started(Tokenize("a"), body=body) for _ in range(THREADS[lane] + 1)]
    assert held.reached.wait(60)
    assert replies(backend, BRIEF)
    for events in slow:
        events.close()
        assert list(events) == [Failed("the question was stopped")]
    wait_until(lambda: not backend.serving._jobs)
    assert not held.go.is_set()


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_model_that_llama_cpp_would_abort_on_leaves_the_old_one_running(
    fresh: LocalBackend, tiny_model: Path, tmp_path: Path, is_draft: bool
) -> None:
    """It is refused before the old one is freed."""
    assert loads(fresh, spec(tiny_model))
    running = endless(fresh, "running")
    bad = write_tiny_gguf(tmp_path / "bad.gguf")
    bad.write_bytes(bad.read_bytes().replace("▁cat".encode(), b"\xe2\x96\x81a\0t"))
    wanted = spec(tiny_model, draft_model=str(bad)) if is_draft else spec(bad)
    assert "has a NUL byte, beside '▁a'" in failure(fresh.load(wanted)).message
    stop(fresh, "running", running)
    assert model_of(fresh).load == 1


def test_a_backend_closes_in_bounded_time_whatever_its_threads_do(
    fresh: LocalBackend, tiny_model: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loads(fresh, spec(tiny_model))
    monkeypatch.setattr("app.worker.loading.resolve", held)
    load = fresh.load(spec(tiny_model))
    assert held.reached.wait(60)
    assert fresh.serving.close(0.1) is False
    held.go.set()
    assert failure(load)
    assert fresh.close() is True


def test_a_load_that_fails_says_why_and_leaves_the_old_model_usable(
    fresh: LocalBackend, tiny_model: Path, tmp_path: Path
) -> None:
    assert failure(fresh.load(spec(tmp_path / "none.gguf")))
    message = failure(fresh.reply(BRIEF)).message
    assert "no model is loaded" in message
    assert "none.gguf" in message and "none.gguf" in str(fresh.status().error)
    assert loads(fresh, spec(tiny_model))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:20_000])
    for wrong, reason in ((tmp_path / "none.gguf", "file not found"), (broken, "is incomplete")):
        message = failure(fresh.load(spec(wrong))).message
        assert reason in message and fresh.status().error == message
        assert model_of(fresh).spec.model == str(tiny_model)
        assert replies(fresh, BRIEF)


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


def test_a_load_that_is_stopped_restores_the_old_model(
    fresh: LocalBackend, tiny_model: Path, long_model: Path
) -> None:
    def stopped() -> list[Event]:
        """The events but the last of a load that is stopped while it reads weights."""
        *events, last = load_stopped_when(
            fresh, long_model, lambda event: event.stage == "load" and event.done > 0
        )
        assert last == Failed(f"loading {long_model} was stopped")
        return events

    stopped()
    assert fresh.status() == Status()
    assert loads(fresh, spec(tiny_model))
    assert [e.model for e in stopped() if isinstance(e, Loading)][-1] == str(tiny_model)
    assert model_of(fresh).spec == spec(tiny_model)
    assert text_of(fresh.reply(request("a cat", max_tokens=2)))


def test_a_tiny_model_leaves_a_core_to_the_browser_and_a_large_one_uses_all() -> None:
    found = [threads_beside_browser(15 * 10**6, n_cores) for n_cores in (8, 2, 1)]
    assert found == [7, 1, 1]
    assert threads_beside_browser(5 * 10**8, 2) == 2


@pytest.mark.parametrize(("asked", "n_threads"), [(3, 3), (None, max(1, physical_cores() - 1))])
def test_the_number_of_threads_is_as_requested_or_suits_the_model(
    fresh: LocalBackend, tiny_model: Path, asked: int | None, n_threads: int
) -> None:
    assert loads(fresh, spec(tiny_model, n_threads=asked))
    assert fresh.serving._engine().context.n_threads == n_threads


def test_the_draft_model_paired_in_models_txt_is_loaded(fresh: LocalBackend) -> None:
    assert loads(fresh, spec("bundled", 512, draft_model=PAIRED))
    assert replies(fresh, request("Hello!", method="draft", max_tokens=8))


def test_batches_are_traced(tiny_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    backend = LocalBackend(trace_batches=trace)
    assert loads(backend, spec(tiny_model))
    n_measured = len(trace.read_text().splitlines())
    replies(backend, request("x", max_tokens=3, method="ar"))
    backend.close()
    lines = trace.read_text().splitlines()[n_measured:]
    assert len(lines) == 3  # a step for each token, the first with the prompt
    assert json.loads(lines[-1])


def test_a_memory_file_is_for_the_first_model(tiny_model: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "memory", write_tiny_gguf(tmp_path / "other.gguf", n_layer=1)
    backend = LocalBackend(memory=file)
    for path in (tiny_model, other, tiny_model):
        assert loads(backend, spec(path))
        replies(backend, request("x", max_tokens=3, method="suffix"))
    backend.close()
    owner = fingerprint(tiny_model)
    assert len(SuffixMemory.load(file, owner, n_vocab=10**6).index.tokens) > 3


def test_texts_are_kept_on_disk_if_wanted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.engine.texts_folder", lambda: tmp_path)
    for megabytes, n_files in ((0, 0), (10, 1)):
        backend = LocalBackend()
        assert loads(backend, spec(tiny_model, parallel=2, keep_texts=megabytes))
        replies(backend, request("a cat " * 20, max_tokens=3))
        backend.close()
        assert len([*tmp_path.glob("*.text")]) == n_files


def test_a_download_reports_progress_and_can_be_stopped(
    fresh: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(model: str, *, bar: Any) -> Path:
        made = bar(total=2_000_000_000, desc=model, unit="B")
        made.update(500_000_000)
        fresh.stop("tab/load")
        made.update(1)
        raise AssertionError("it was stopped")

    monkeypatch.setattr("app.worker.loading.resolve", resolve)
    *events, last = fresh.load(ModelSpec("big"), "tab/load")
    told = [event for event in events if isinstance(event, Loading)]
    assert [(one.model, one.stage) for one in told] == [("big", "load"), ("big", "download")]
    assert told[1].done / told[1].total == 0.25
    assert last == Failed("loading big was stopped")


def test_a_hub_model_is_downloaded_with_progress_and_loaded(
    fresh: LocalBackend, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tiny_model.read_bytes()
    with HubServer() as hub:
        hub.add("owner/repo", "tiny.gguf", content)
        use_hub(hub, tmp_path / "hub", monkeypatch)
        *events, last = fresh.load(spec("hf:owner/repo/tiny.gguf"))
        close_session()
    bytes_done = [e.done for e in events if isinstance(e, Loading) and e.stage == "download"]
    assert bytes_done == sorted(bytes_done)
    assert bytes_done[-1] == len(content)
    assert isinstance(last, Loaded)
    assert replies(fresh, BRIEF)
