"""The engine in a process of its own: what ends it is reported, and the next request goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from app.worker import process, remote
from app.worker.messages import (
    Answer,
    Detokenize,
    Done,
    Failed,
    Loaded,
    ModelSpec,
    Status,
    Tokenize,
)
from app.worker.remote import RemoteBackend
from tests.app.worker.test_backend import ENDLESS, failure, request, text_of, until_tokens
from tests.support.fake_endpoint import served
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.waiting import wait_until

# An engine that soon finds that something takes too long.
IMPATIENT = """
import time
from batching import watched
watched.STEP_SECONDS = 2.0
from app.worker import __main__
from speculation.engine import Engine
from speculation.scheduler import Scheduler
__main__.BEAT_SECONDS = 0.1
hang = lambda *_, **__: time.sleep(60)
{}
__main__.main()
"""
# An engine that never gets the files of the model “slow”.
SLOW = """
import time
from app.worker import __main__, loading
resolve = loading.resolve
loading.resolve = lambda name, **bar: time.sleep(600) if name == "slow" else resolve(name, **bar)
__main__.main()
"""
# An engine that never has loaded.
LOADING = """
import time
from app.worker import __main__
from speculation.runtime import Runtime
def load(source, progress):
    progress(0.5)
    time.sleep(600)
Runtime.open = load
__main__.main()
"""
# An engine that a model of a certain name ends.
ABORTING = """
import os
from app.worker import __main__, loading
load = loading.Engine.load
def abort(name, *values, **more):
    return os.abort() if name.endswith("{name}") else load(name, *values, **more)
loading.Engine.load = abort
__main__.main()
"""
# An engine that a model ends, as llama.cpp does after an error of CUDA.
CUDA_ERROR = """
from app.worker import __main__, loading
from batching.llama import log
from batching.llama.library import exported
from tests.app.worker.test_remote import LOGGED
def abort(*values, **more):
    log.initialise()
    for line in LOGGED:
        log._log(4, line.encode(), None)
    exported("ggml_abort")(b"/src/ggml-cuda/ggml-cuda.cu", 109, b"CUDA error")
loading.Engine.load = abort
__main__.main()
"""
LOGGED = (
    "CUDA error: an illegal memory access was encountered\n",
    "  current device: 0, in function ggml_backend_cuda_synchronize at /src/ggml-cuda.cu:3051\n",
    "  cudaGetLastError()\n",
)
APP = """
import sys, time
from app.api.service import Service
from app.hosts import address, bind
from app.server import endpoint, guard, serve
from app.worker import remote
starting = remote.COMMAND
stopped = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
blocked = [sys.executable, "-c", "import ctypes; ctypes.PyDLL(None).sleep(60)"]
pids = []
for remote.COMMAND in (stopped, blocked, starting):
    process = remote.RemoteBackend()._process
    pids += [process._process.pid, process._guardian.pid]
time.sleep(0.5)
print(*pids, flush=True)
time.sleep(60)
"""
WEDGED = """
import os, signal, sys, time
from app import start
from app.worker import remote

def stopped(self):
    process = started(self)
    while not process._n_heard:
        time.sleep(0.01)
    os.kill(process._process.pid, signal.SIGSTOP)
    print(process._process.pid, file=sys.stderr, flush=True)
    return process

started, remote.RemoteBackend._started = remote.RemoteBackend._started, stopped
remote.CLOSE_SECONDS = {seconds}
start.main(["--no-browser"])
"""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("remote") / "tiny.gguf", n_ctx=8192)


@pytest.fixture
def backend(model: Path) -> Iterator[RemoteBackend]:
    made = RemoteBackend()
    assert has_loaded(made, model)
    yield made
    assert made.close()


@pytest.fixture
def using(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets constants of ``remote``, and the program of the engines that are started from then."""

    def use(program: str = "", **constants: object) -> None:
        constants |= {"COMMAND": [sys.executable, "-c", program]} if program else {}
        for name, value in constants.items():
            monkeypatch.setattr(remote, name, value)

    return use


def spec(path: Path) -> ModelSpec:
    return ModelSpec(str(path), n_threads=1, flash_attn="off", parallel=2)


def has_loaded(backend: RemoteBackend, path: Path) -> bool:
    return isinstance(list(backend.load(spec(path)))[-1], Loaded)


def replies(backend: RemoteBackend) -> bool:
    return isinstance(list(backend.reply(request(max_tokens=2)))[-1], Done)


def kill(backend: RemoteBackend) -> None:
    os.kill(backend._process._process.pid, signal.SIGKILL)


def wait_for(backend: RemoteBackend, is_so: Callable[[Status], bool]) -> Status:
    wait_until(lambda: is_so(backend.status()))
    return backend.status()


def is_back(status: Status) -> bool:
    return status.model is not None and not status.is_down


def pauses(status: Status) -> bool:
    return "in 3600 s" in (status.error or "")


def test_the_first_engine_takes_the_process_that_started_early() -> None:
    process.start_early()
    (early,) = process._early
    first, second = RemoteBackend(), RemoteBackend()
    assert first._process._process is early
    assert second._process._process is not early
    assert first.close() and second.close()
    process.start_early()
    (early,) = process._early
    other = RemoteBackend(method_file="ar")  # its process has arguments
    assert early.wait(60) != 0
    assert other.close()


def test_a_dead_engine_is_reported_and_another_is_started(
    backend: RemoteBackend, model: Path
) -> None:
    before = text_of(backend.reply(request(max_tokens=12)))
    running = backend.reply(request(sampling=ENDLESS))
    until_tokens(running)
    kill(backend)
    why = f"The engine's process ended: SIGKILL. {model} is loaded again now."
    assert failure(running) == Failed(why, why, "no model")
    wait_for(backend, is_back)
    *after, done = backend.reply(request(max_tokens=12))
    assert isinstance(done, Done)
    assert text_of(after) == before != ""
    assert backend.status().error is None
    (answer,) = backend.ask(Tokenize("a cat"))
    assert isinstance(answer, Answer)
    ids = tuple(token for token, _ in answer.tokens)
    assert list(backend.ask(Detokenize(ids))) == [Answer("a cat")]


@pytest.mark.parametrize(("has_model", "status"), [(False, 503), (True, 200)])
def test_no_route_waits_for_a_load_and_the_loaded_model_goes_on(
    model: Path, using: Callable[..., None], has_model: bool, status: int
) -> None:
    using(SLOW, CLOSE_SECONDS=0.1)
    backend = RemoteBackend()
    assert not has_model or has_loaded(backend, model)
    next(backend.load(ModelSpec("slow")))
    with httpx.Client(base_url=served(backend), timeout=20) as http:
        found = [http.get(path).status_code for path in ("health", "slots", "props", "metrics")]
        assert found == [status] * 3 + [200]
        for path in ("tokenize", "completion"):
            body = {"content": "a", "prompt": "a", "n_predict": 2}
            assert http.post(path, json=body).status_code == status
        if has_model:
            backend._status = replace(backend.status(), is_down=True, error="it ended")
            health = http.get("health")
            told = health.json()["error"]["message"]
            assert (health.status_code, told) == (503, "it ended")
    has_closed = backend.close()
    assert not (has_model and has_closed)  # the old model may have something to save


def test_a_large_request_goes_through_and_an_odd_one_stops_no_other(backend: RemoteBackend) -> None:
    text = "a cat " * 80_000
    (answer,) = backend.ask(Tokenize(text))
    assert isinstance(answer, Answer)
    assert b"".join(piece for _, piece in answer.tokens).decode() == text
    assert failure(backend.reply(request(text))).kind == "too long"
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"not": deep}
    unsent = "the request cannot be sent to the engine: "
    for sampling, reason in (
        ({"json_schema": deep}, f"{unsent}it is nested too deep"),
        ({"grammar": lambda: None}, f"{unsent}Encoding objects of type function is "),
        ({"grammar": 'root ::= "\ud800"'}, "a text has '\\ud800', which is half a character"),
    ):
        failed = failure(backend.reply(request(sampling=sampling)))
        assert failed.message.startswith(reason) and failed.kind == "invalid"
    assert failure(backend.load(None))  # type: ignore[arg-type]
    assert replies(backend)


def test_an_engine_that_does_not_answer_is_ended(
    backend: RemoteBackend, using: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = backend.reply(request(sampling=ENDLESS))
    until_tokens(running)
    using(BEAT_SECONDS=0.1, SILENT_SECONDS=1.0)
    os.kill(backend._process._process.pid, signal.SIGSTOP)
    why = "The engine's process ended: it did not answer for 1 s."
    assert failure(running).message.startswith(why)
    monkeypatch.undo()
    assert replies(backend)


@pytest.mark.parametrize(
    ("hanging", "what"),
    [("Scheduler._decode = hang", "a step"), ("Engine.load = hang", "loading")],
)
def test_work_that_takes_too_long_ends_the_engine(
    using: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    hanging: str,
    what: str,
) -> None:
    using(IMPATIENT.format(hanging), PAUSES=(3600,))
    backend = RemoteBackend()
    events = list(backend.load(spec(model)))
    if what != "loading":
        assert isinstance(events[-1], Loaded)
        events = list(backend.reply(request(max_tokens=5)))
    assert f"ended: it took too long over {what}" in failure(events).message
    monkeypatch.undo()
    assert has_loaded(backend, model)
    assert backend.close()


def test_a_model_that_ends_the_engine_again_and_again_is_loaded_after_pauses(
    backend: RemoteBackend,
    model: Path,
    using: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    using(ABORTING.format(name=model.name), PAUSES=(0, 3600))
    kill(backend)
    status = wait_for(backend, pauses)
    assert (
        status.error == f"The engine's process ended: SIGABRT. {model} is loaded again in 3600 s."
    )
    assert status.is_down
    failed = failure(backend.reply(request()))
    assert (failed.kind, failed.message) == ("no model", status.error)
    monkeypatch.undo()
    backend._restart()  # as if the time had passed
    assert replies(backend)
    assert not wait_for(backend, lambda status: status.error is None).is_down
    monkeypatch.setattr(backend._process, "ask", None)
    backend._restart()  # a timer that is late asks for nothing
    monkeypatch.undo()


def test_a_process_that_cannot_be_started_is_tried_again(
    backend: RemoteBackend, using: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    using(PAUSES=(0, 3600), COMMAND=["/no/such/program"])
    running = backend.reply(request(sampling=ENDLESS))
    kill(backend)
    assert failure(running)
    assert backend._n_deaths == 2
    monkeypatch.undo()
    backend._restart()  # as if the time had passed
    assert replies(backend)


def test_an_abort_names_the_error_that_only_the_log_has_and_keeps_the_log(
    model: Path, using: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    using(CUDA_ERROR, PAUSES=(3600,), KEPT_BYTES=600)
    monkeypatch.setenv("SPECULATION_CACHE", str(tmp_path / "cache"))
    backend, file = RemoteBackend(), tmp_path / "cache" / "engine.log"
    for _ in range(2):
        assert failure(backend.load(spec(model))).message == (
            "The engine's process ended: SIGABRT (CUDA error: an illegal memory access was "
            f"encountered). Its last lines are in {file}. {model} is loaded again in 3600 s."
        )
    text = file.read_text()
    assert "".join([*LOGGED, "/src/ggml-cuda/ggml-cuda.cu:109: CUDA error\n"]) in text
    assert len(text) == 600
    assert file.stat().st_mode & 0o777 == 0o600
    assert backend.close()


CUDA = """\
CUDA error: {}
  current device: 0, in function {} at /src/ggml/src/ggml-cuda/{}
  {}
/src/ggml/src/ggml-cuda/ggml-cuda.cu:109: CUDA error
"""
VULKAN = """\
ggml_vulkan: getFenceStatus at /src/ggml/src/ggml-vulkan/ggml-vulkan.cpp:360
terminate called after throwing an instance of 'vk::DeviceLostError'
  what():  vk::Device::getFenceStatus: ErrorDeviceLost
"""
VULKAN_OP = """\
ggml_vulkan: Error: Missing op: SOLVE_TRI for f32 and f32 to f32
/src/ggml/src/ggml-vulkan/ggml-vulkan.cpp:12110: fatal error
"""


# fmt: off
SAID = [
    (CUDA.format("operation not permitted when stream is capturing", "argsort_f32_i32_cuda_cub",
                 "argsort.cu:102", "DeviceSegmentedSort::SortPairs(d_temp_storage, bytes)"),
     "CUDA error: operation not permitted when stream is capturing"),
    (CUDA.format("out of memory", "alloc", "ggml-cuda.cu:502", "cudaGetLastError()"),
     "CUDA error: out of memory"),
    (VULKAN, "what():  vk::Device::getFenceStatus: ErrorDeviceLost"),
    (VULKAN_OP, "ggml_vulkan: Error: Missing op: SOLVE_TRI for f32 and f32 to f32"),
    ("set_rows: error: an older one\n"
     "/src/ggml/src/ggml-cpu/ops.cpp:5012: GGML_ASSERT(i01 >= 0 && i01 < ne01) failed\n",
     "ops.cpp:5012: GGML_ASSERT(i01 >= 0 && i01 < ne01) failed"),
    ("/src/ggml/src/ggml-backend.cpp:900: fatal error\n", "ggml-backend.cpp:900: fatal error"),
    ("ValueError: no\nbye\n", "ValueError: no"),
    ("all is well\n", ""),
]
# fmt: on


@pytest.mark.parametrize(("printed", "said"), SAID)
def test_the_line_that_names_the_error_is_found(printed: str, said: str) -> None:
    assert remote._reason(-6, printed.splitlines()) == (f"SIGABRT ({said})" if said else "SIGABRT")


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_model_that_ends_the_engine_as_it_loads_does_not_take_the_old_one_with_it(
    model: Path, using: Callable[..., None], tmp_path: Path, n_before: int
) -> None:
    """Without an old one it is tried again."""
    using(ABORTING.format(name="bad.gguf"), PAUSES=(0, 0, 3600))
    backend, bad = RemoteBackend(), tmp_path / "bad.gguf"
    shutil.copy(model, bad)
    assert not n_before or has_loaded(backend, model)
    message = failure(backend.load(spec(bad))).message
    again = model if n_before else bad
    assert message == f"The engine's process ended: SIGABRT. {again} is loaded again now."
    if n_before:
        found = wait_for(backend, is_back).model
        assert found is not None and found.spec == spec(model)
        assert replies(backend)
    else:
        wait_for(backend, pauses)
        assert backend._n_deaths == 3
        assert has_loaded(backend, model)
    assert backend.close()


def test_a_load_after_a_death_leaves_the_old_model_at_work(
    model: Path, using: Callable[..., None]
) -> None:
    using(SLOW, CLOSE_SECONDS=0.1, PAUSES=(3600,))
    backend = RemoteBackend()
    assert has_loaded(backend, model)
    kill(backend)
    wait_for(backend, lambda status: status.is_down)
    backend.load(ModelSpec("slow"))
    assert replies(backend)
    assert not backend.status().is_down
    assert not backend.close()


def test_a_load_or_an_engine_that_starts_keeps_nobody_waiting(
    model: Path, using: Callable[..., None]
) -> None:
    using(LOADING)
    backend = RemoteBackend()
    loading = backend.load(spec(model))
    while getattr(next(loading), "stage", "") != "load":
        pass
    assert backend.close()
    using("import time; time.sleep(600)")
    assert RemoteBackend().close()


def test_no_process_is_left_when_the_app_is_killed() -> None:
    """Whether the engine's process is starting, stopped, or holds Python's lock for long."""
    with subprocess.Popen(
        [sys.executable, "-c", APP], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as app:
        assert app.stdout is not None
        left = {int(pid) for pid in app.stdout.readline().split()}
        assert len(left) == 6  # three engines and a guardian for each
        app.kill()
    deadline = time.monotonic() + 20
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if is_running(pid)}
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("seconds", "presses"), [(0.2, 1), (3600, 2)])
def test_ctrl_c_ends_the_app_even_if_the_engine_does_not_respond(
    seconds: float, presses: int
) -> None:
    """Once is enough after a while; a second time ends it at once."""
    command = [sys.executable, "-W", "ignore", "-c", WEDGED.format(seconds=seconds)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            stopped = int(process.stderr.readline())
            assert "press Ctrl-C to stop" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            if presses == 1:
                assert process.wait(60) == 1
                return
            while process.poll() is None:  # the first one may not have been noticed yet
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            assert process.returncode == -signal.SIGINT
        finally:
            process.kill()
            with suppress(ProcessLookupError):  # a stopped process cannot end by itself
                os.kill(stopped, signal.SIGKILL)
