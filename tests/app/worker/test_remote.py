"""The engine in a process of its own: what ends it is reported, and the next request goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.worker import remote
from app.worker.messages import (
    Answer,
    ChatRequest,
    Detokenize,
    Done,
    Event,
    Failed,
    Loaded,
    ModelSpec,
    Text,
    Tokenize,
)
from app.worker.remote import RemoteBackend
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf

ENDLESS = {"grammar": "root ::= [a-z] root"}
# Each rule doubles the ways to read nothing.
LEVELS = "".join(f"r{i} ::= r{i + 1}? r{i + 1}?\n" for i in range(30))
HANGING = {"grammar": f"root ::= r0\n{LEVELS}r30 ::= [a-z]"}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("remote") / "tiny.gguf", n_ctx=8192)


@pytest.fixture
def backend(model: Path) -> Iterator[RemoteBackend]:
    made = RemoteBackend()
    assert isinstance(list(made.load(spec(model)))[-1], Loaded)
    yield made
    assert made.close()


def spec(path: Path) -> ModelSpec:
    return ModelSpec(str(path), n_threads=1, flash_attn="off", parallel=2)


def request(text: str = "a cat", **options: object) -> ChatRequest:
    return ChatRequest("one", ({"role": "user", "content": text},), **options)  # type: ignore[arg-type]


def kill(backend: RemoteBackend) -> None:
    os.kill(backend._process._process.pid, signal.SIGKILL)


def text_of(events: list[Event]) -> str:
    return "".join(text for event in events if isinstance(event, Text) for text, _ in event.pieces)


def test_a_dead_engine_is_reported_and_the_next_request_starts_another(
    backend: RemoteBackend,
) -> None:
    before = list(backend.reply(request(max_tokens=12)))
    running = backend.reply(request(sampling=ENDLESS))
    while not isinstance(next(running), Text):
        pass
    kill(backend)
    failed = list(running)[-1]
    assert failed == Failed(
        "The engine's process ended: SIGKILL. The next request starts a new one.",
        "The engine's process ended: SIGKILL. The next request starts a new one.",
    )
    status = backend.status()
    assert status.model is not None and status.error == failed.message
    after = list(backend.reply(request(max_tokens=12)))
    assert isinstance(after[-1], Done)
    assert text_of(after) == text_of(before) != ""
    assert backend.status().error is None
    (answer,) = backend.ask(Tokenize("a cat"))
    assert isinstance(answer, Answer)
    assert list(backend.ask(Detokenize(tuple(token for token, _ in answer.value)))) == [
        Answer("a cat")
    ]


def test_work_that_blocks_the_engine_ends_it(backend: RemoteBackend) -> None:
    failed = list(backend.reply(request(sampling=HANGING, max_tokens=5)))[-1]
    assert isinstance(failed, Failed)
    assert "it took too long over a grammar" in failed.message
    assert isinstance(list(backend.reply(request(max_tokens=2)))[-1], Done)


def test_a_model_that_ends_the_engine_twice_is_not_loaded_a_third_time_by_itself(
    backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MOST_DEATHS", 2)
    for _ in range(2):
        kill(backend)
        while not backend._process.is_dead:
            time.sleep(0.01)
        if backend._n_deaths < 2:
            backend._process = backend._started()
    (failed,) = backend.reply(request())
    assert isinstance(failed, Failed)
    assert "That was 2 times in a row: load this model again, or another one." in failed.message
    model = backend.status().model
    assert model is not None
    assert isinstance(list(backend.load(model.spec))[-1], Loaded)
    assert isinstance(list(backend.reply(request(max_tokens=2)))[-1], Done)


def test_no_process_is_left_when_the_app_is_killed(model: Path) -> None:
    program = (
        "import time; from app.worker.remote import RemoteBackend; b = RemoteBackend(); "
        "print(b._process._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(1.0)  # it may be importing
        process.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
