"""The benchmark's JSON file: updated every round, readable at all times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter
from speculation.bench import __main__ as bench
from speculation.bench.json_file import check_writable, read_json, write_json
from speculation.bench.results import Curve, Difference, Skipped
from tests.speculation.bench.runs import PROMPTS, results, run
from tests.support.paths import ROOT

# Kills itself when the second round is measured but not yet written.
KILLED = """
import os, signal, sys
from speculation.bench import __main__ as bench
from speculation.bench.suites import suite
measure = suite.measure
def killed(*arguments):
    for n, item in enumerate(measure(*arguments)):
        if n == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item
suite.measure = killed
bench.main(sys.argv[1:])
"""


# Its output pipe is closed, and its report is an empty file.
UNREAD = """
import os, sys
from pathlib import Path
from speculation.bench import __main__ as bench
bench.write_report = lambda folder, *_, **__: folder.touch()
bench.require_matplotlib = lambda: None
reader, writer = os.pipe()
os.dup2(writer, 1)
def differences(*_):
    os.close(reader)
    return ""
bench.differences = differences
sys.exit(bench.main(sys.argv[1:]))
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def flags(tiny_model: Path, tmp_path: Path, out: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS, encoding="utf-8")
    return [
        *("--model", str(tiny_model), "--prompts", str(prompts), "--n-predict", "6"),
        *("--methods", "ar", "jacobi", "--threads", "1", "--kv-type", "f32", "--json", str(out)),
    ]


def run_program(code: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is left is written at exit
    command = [sys.executable, "-c", code, *flags]
    return subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True)


def test_a_killed_benchmark_keeps_the_finished_rounds(flags: list[str], out: Path) -> None:
    assert run_program(KILLED, flags).returncode == -signal.SIGKILL
    kept = read_json(out)
    assert [(one.prompt_id, one.method) for one in kept.runs] == [("c1", "ar"), ("c1", "jacobi")]
    assert kept.complete is False


def test_a_closed_pipe_loses_neither_results_nor_report(
    flags: list[str], out: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    done = run_program(UNREAD, [*flags, "--report", str(report)])
    assert done.returncode == bench.FAILED
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr
    assert read_json(out).complete is True
    assert report.exists()


@pytest.mark.parametrize("text", ['{"prompt": "Hi"}\n', "GGUF", '{"complete": true}'])
def test_a_file_that_is_not_a_benchmark_is_not_overwritten(
    text: str, flags: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.write_text(text, encoding="utf-8")
    assert bench.main(flags) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {out} exists and is not a benchmark's JSON, so it is not overwritten; give "
        f"another --json, or delete the file"
    )
    assert out.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}', '{"model": {}, "device": {}}'])
def test_a_file_without_benchmark_results_cannot_be_read(text: str, out: Path) -> None:
    out.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidParameter, match="cannot read results from .*out.json: "):
        read_json(out)


FOUND: dict[str, Any] = {"rows_histogram": {1: 1, 4: 1}, "tokens_histogram": {1: 1, 2: 1}}
DIFFERENT = Difference(1, 7, None, None)
RESULTS = results(
    run("ar", "p", 2, 1.0),
    run("auto", "p", 2, 1.0, first_difference=DIFFERENT, accepted_by_source={"suffix": 1}, **FOUND),
    skipped=[Skipped("a", "chat", "long")],
    curves=[Curve(128, [1, 2], [0.5, 0.75])],
)


def test_results_are_read_back_as_they_were_written(out: Path) -> None:
    for written in (RESULTS, replace(RESULTS, complete=False)):
        write_json(out, written)
        assert read_json(out) == written
    check_writable(out)  # a file of ours may be replaced


def test_a_failed_write_leaves_the_old_file(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.write_text("old", encoding="utf-8")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(out, RESULTS)
    assert out.read_text(encoding="utf-8") == "old"


def test_a_file_that_is_briefly_locked_is_replaced_afterwards(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, locked = Path.replace, [True, True]

    def replace_if_free(new: Path, path: Path) -> Path:
        if locked and locked.pop():
            raise PermissionError(13, "The process cannot access the file")
        return replace(new, path)

    monkeypatch.setattr(Path, "replace", replace_if_free)
    write_json(out, RESULTS)
    assert read_json(out) == RESULTS
    assert locked == []
