"""The command ``speculation`` and its subcommand ``models``."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import httpx
import llama_cpp as C
import pytest

from app import cli, models, start
from app.store import Store
from app.worker.messages import Loaded
from speculation.registry import ModelEntry
from tests.app.browser.chat import free_port
from tests.support.fake_backend import MODEL, FakeBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What would start an engine's process before the imports."""
    started: list[bool] = []
    monkeypatch.setattr(cli, "start_early", lambda: started.append(True))
    return started


def test_a_command_runs_its_program_with_the_flags_after_it(
    monkeypatch: pytest.MonkeyPatch, early: list[bool]
) -> None:
    """``python -m app`` has the commands, and is the chat without one."""
    seen: list[tuple[list[str], str]] = []

    def run(flags: list[str], prog: str) -> int:
        seen.append((flags, prog))
        return 7

    monkeypatch.setattr(start, "main", run)
    for command in ("chat", "serve"):
        assert cli.main([command, "--model", "m.gguf", "--help"]) == 7
    for given in ([], ["--no-page", "--port", "80"], ["serve", "--port", "80"]):
        monkeypatch.setattr(sys, "argv", ["app", *given])
        with pytest.raises(SystemExit, match="7"):
            runpy.run_module("app", run_name="__main__")
    assert seen == [
        (["--model", "m.gguf", "--help"], "speculation chat"),
        (["--no-page", "--model", "m.gguf", "--help"], "speculation serve"),
        ([], "python -m app chat"),
        (["--no-page", "--port", "80"], "python -m app chat"),
        (["--no-page", "--port", "80"], "python -m app serve"),
    ]
    assert len(early) == 3  # not for --help


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_and_errors_name_the_program_that_was_typed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: speculation {command} ")
    with pytest.raises(SystemExit):
        cli.main([command, "--nonsense"])
    assert f"speculation {command}" in capsys.readouterr().err


def test_no_command_shows_the_usage_and_an_unknown_one_lists_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 0
    assert "usage: speculation COMMAND" in capsys.readouterr().out
    assert cli.main(["talk"]) == 2
    assert capsys.readouterr().err == (
        "speculation: unknown command 'talk'; `speculation --help` lists them\n"
    )


def test_the_version_is_that_of_both_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"speculation {version('speculation')} (llama-cpp-python {C.__version__})"
    with pytest.raises(SystemExit):
        cli.main(["serve", "--version"])
    assert capsys.readouterr().out == f"{line}\n"


def test_ctrl_c_and_a_reader_that_goes_leave_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(flags: list[str], prog: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.models.main", interrupted)
    assert cli.main(["models"]) == 130
    for flags in (["models"], ["--help"], ["bench", "--list-methods"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "app.cli", *flags]
        done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=-1, text=True)
        os.close(writing)
        assert (done.returncode, done.stderr) == (2, ""), flags


def test_serve_ends_with_the_reason_if_its_model_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for name, reason in (("missing.gguf", "file not found"), ("broken.gguf", "broken.gguf")):
        command = [sys.executable, "-m", "app.cli", "serve", "--port", free_port()]
        command += ["--model", str(tmp_path / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        loading, error = done.stderr.splitlines()
        assert loading.startswith(f"Loading {tmp_path / name}. The endpoint will be at http://")
        assert error.startswith("error: ") and reason in error
        assert "Traceback" not in done.stderr


def test_serve_goes_on_without_anybody_to_print_to_and_with_a_socks_proxy(
    tiny_model: Path, tmp_path: Path
) -> None:
    port, (reading, closed) = free_port(), os.pipe()
    os.close(reading)
    full = os.open("/dev/full" if Path("/dev/full").exists() else os.devnull, os.O_WRONLY)
    command = [sys.executable, "-m", "app", "--no-browser", "--port", port]
    server = subprocess.Popen(
        [*command, "--model", tiny_model, "--chats", tmp_path / "chats.db"],
        cwd=ROOT,
        env={**os.environ, "ALL_PROXY": "socks5://127.0.0.1:9"},
        stdout=full,
        stderr=closed,
    )
    os.close(full)
    os.close(closed)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        try:
            found = 0
            while found != 200:  # the page, and the model
                assert server.poll() is None
                with suppress(httpx.TransportError):
                    found = http.get("/health").status_code
            assert http.get("/").status_code == 200
            assert http.post("/completion", json={"prompt": 5}).status_code == 400  # is logged
            assert http.get("/health").status_code == 200
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


def test_a_second_start_opens_the_page_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    store = Store(tmp_path / "chats.db", "http://localhost:7870/")
    assert start.main(["--chats", str(store.database.path)]) == 0
    assert opened == ["http://localhost:7870/"]
    said = capsys.readouterr().err
    assert said.startswith(f"The chats in {store.database.path} are open at http://localhost:7870/")
    store.close()


def test_a_loaded_model_is_followed_by_what_computes_it_and_its_context(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(replace(MODEL, computed_by="Computed by the CPU (AMD EPYC)."))
    backend = FakeBackend()
    monkeypatch.setattr(backend, "load", lambda spec: [loaded])
    start._load(backend, MODEL.spec, [], threading.Event())
    assert capsys.readouterr().err == (
        "Computed by the CPU (AMD EPYC).\nContext 2,048 tokens (the model's own)\n"
    )


def test_the_list_of_models_says_which_are_downloaded_and_which_is_the_default(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here.gguf"
    here.touch()
    entries = [
        ModelEntry("first", here, None, "MIT", n_bytes=10**9),
        ModelEntry("second", here, None, ""),
        ModelEntry("elsewhere", tmp_path / "no.gguf", None, "v2", n_bytes=4_700_000_000),
        ModelEntry("nowhere", tmp_path / "no.gguf", None, ""),
    ]
    assert models.table(entries, "first").splitlines() == [
        "first      default  MIT",
        "second     here     ",
        "elsewhere  4.7 GB   v2",
        "nowhere             ",
    ]


def test_models_prints_the_file_of_a_name_and_one_line_for_an_unknown_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert models.main(["bundled"]) == 0
    assert capsys.readouterr().out == f"{ROOT / 'models' / 'speculation-14m-q8_0.gguf'}\n"
    assert models.main(["bundeld"]) == 2
    assert "file not found: bundeld. Give the path" in (told := capsys.readouterr().err)
    assert "such as bundled" in told


def test_the_bench_starts_without_gradio() -> None:
    code = "import sys, app.cli; app.cli.main(['bench', '--list-methods'])"
    command = [sys.executable, "-c", f"{code}; assert 'gradio' not in sys.modules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
