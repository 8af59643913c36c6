"""The benchmark's result file: updated every round, resumed, and refused if it does not match."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from speculation.bench import __main__ as bench
from speculation.bench.json_file import JsonFile, read_json
from speculation.bench.results import Curve, Difference, Results, Run, Skipped
from speculation.bench.run import measure
from speculation.bench.suites import suite
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf

PROMPTS = (
    '{"question_id": "c1", "category": "cats", "turns": ["the cat saw a dog", "and a cat"]}\n'
    '{"question_id": "d1", "category": "dogs", "prompt": "a dog, a cat and the dog"}\n'
)
ROUNDS = ["c1", "c1#2", "d1"]
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
def flags(tiny_model: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS, encoding="utf-8")
    return [
        *("--model", str(tiny_model), "--prompts", str(prompts), "--n-predict", "6"),
        *("--methods", "ar", "jacobi", "--threads", "1", "--kv-type", "f32"),
        *("--json", str(tmp_path / "out.json")),
    ]


@pytest.fixture
def unfinished(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of a benchmark whose file has the first of three rounds."""
    with monkeypatch.context() as patch:
        patch.setattr(suite, "measure", broken_off(measure))
        assert bench.main([*flags]) == bench.INTERRUPTED
    return flags


def broken_off(measure: Any) -> Any:
    def interrupted(*arguments: Any) -> Iterator[Any]:
        for n, item in enumerate(measure(*arguments)):
            if n == 1:
                raise KeyboardInterrupt
            yield item

    return interrupted


def file_of(flags: Sequence[str]) -> Path:
    return Path(flags[flags.index("--json") + 1])


def document(flags: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file_of(flags).read_text(encoding="utf-8"))
    return found


def rounds(flags: Sequence[str]) -> list[tuple[str, str]]:
    return [(run["prompt_id"], run["method"]) for run in document(flags)["runs"]]


def test_a_killed_benchmark_keeps_the_finished_rounds_and_resumes(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, *flags], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    kept = document(flags)
    assert rounds(flags) == [("c1", "ar"), ("c1", "jacobi")]
    assert kept["complete"] is False

    assert bench.main([*flags, "--resume"]) == 0
    whole = document(flags)
    assert rounds(flags) == [(name, method) for name in ROUNDS for method in ("ar", "jacobi")]
    assert whole["complete"] is True
    assert whole["runs"][:2] == kept["runs"]  # not measured again
    assert whole["started"] == kept["started"]
    assert "all categories: 3 prompts" in capsys.readouterr().out

    at_once = [*flags[:-1], str(tmp_path / "at_once.json")]
    assert bench.main(at_once) == 0
    # The second turn continued the reply that was in the file.
    assert [run["tokens"] for run in whole["runs"]] == [
        run["tokens"] for run in document(at_once)["runs"]
    ]


def test_a_closed_pipe_loses_neither_results_nor_report(flags: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report"
    command = [sys.executable, "-c", UNREAD, *flags, "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == bench.FAILED
    assert "ipe" not in done.stderr
    assert document(flags)["complete"] is True
    assert report.exists()


def test_with_nothing_left_to_measure_the_tables_are_shown(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*flags, "--resume"]) == 0  # there is no file yet, so it starts
    before = file_of(flags).read_bytes()
    monkeypatch.setattr(suite, "warm_up", None)
    monkeypatch.setattr(suite, "measure", None)
    capsys.readouterr()
    assert bench.main([*flags, "--resume"]) == 0
    shown = capsys.readouterr()
    assert "all categories: 3 prompts" in shown.out
    assert "every text identical to plain decoding (6 runs)" in shown.out
    assert "nothing is left to measure" in shown.err
    assert file_of(flags).read_bytes() == before


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--n-predict", "7", "n_predict: was 6, is now 7"),
        ("--methods", "ar", "methods: was ar, jacobi, is now ar"),
        ("--temperature", "0.5", "temperature: was 0.0, is now 0.5"),
        ("--kv-type", "f16", "kv_type: was f32, is now f16"),
        ("--limit", "1", "limit: was None, is now 1"),
        ("--threads", "2", "device threads: was 1, is now 2"),
    ],
)
def test_a_file_with_other_settings_is_refused(
    flag: str,
    value: str,
    reason: str,
    unfinished: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = file_of(unfinished).read_bytes()
    assert bench.main([*unfinished, flag, value, "--resume"]) == 2
    error = capsys.readouterr().err
    assert f"error: --resume cannot continue {file_of(unfinished)}" in error
    assert f"\n  {reason}\n" in error
    assert "give the same model and settings, or another --json" in error
    assert file_of(unfinished).read_bytes() == before


def test_changed_prompts_are_detected(
    unfinished: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS.replace("saw", "ate"), encoding="utf-8")
    assert bench.main([*unfinished, "--resume"]) == 2
    assert "\n  prompts_hash: " in capsys.readouterr().err


def test_another_model_of_the_same_name_and_size_is_detected(
    unfinished: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    other = write_tiny_gguf(tmp_path / "other" / "tiny.gguf", seed=1)
    assert bench.main([*unfinished, "--model", str(other), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "\n  model fingerprint: " in error
    assert "n_bytes" not in error


def test_an_unfinished_file_is_not_overwritten_without_resume(
    unfinished: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = file_of(unfinished).read_bytes()
    assert bench.main(unfinished) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {file_of(unfinished)} is an unfinished benchmark; add --resume to continue it, "
        f"give another --json, or delete the file"
    )
    assert file_of(unfinished).read_bytes() == before


@pytest.mark.parametrize("text", ['{"prompt": "Hi"}\n', "GGUF", '{"complete": true}'])
def test_a_file_that_is_not_a_benchmark_is_not_overwritten(
    text: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(flags).write_text(text, encoding="utf-8")
    assert bench.main(flags) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {file_of(flags)} exists and is not a benchmark of this version, so it is not "
        f"overwritten; give another --json, or delete the file"
    )
    assert file_of(flags).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}', '{"model": {}, "device": {}}'])
def test_a_file_without_benchmark_results_is_refused(
    text: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(flags).write_text(text, encoding="utf-8")
    assert bench.main([*flags, "--resume"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: cannot read results from {file_of(flags)}: ")


def test_resume_without_a_file_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--resume"])
    assert "--resume needs a file to continue; give --json FILE" in capsys.readouterr().err


RUN = Run(
    method="auto",
    prompt_id="chat-01#2",
    category="chat",
    repeat=1,
    n_prompt=5,
    tokens=[7, 8, 9],
    n_first=1,
    n_steps=2,
    n_rows=5,
    n_drafted=3,
    n_accepted=1,
    prefill_seconds=0.25,
    decode_seconds=0.5,
    phase_seconds={"draft": 0.1, "build": 0.1, "decode": 0.1, "verify": 0.1, "commit": 0.1},
    finish_reason="length",
    first_difference=Difference(1, 7, None, None),
    rows_histogram={1: 1, 4: 1},
    tokens_histogram={1: 1, 2: 1},
    accepted_by_source={"prompt-lookup": 1},
)
RESULTS = Results(
    model={"file": "m.gguf"},
    device={"threads": 1},
    settings={"repeat": 2},
    started="2026-01-31T12:30:00+00:00",
    runs=[RUN],
    skipped=[Skipped("a", "chat", "long")],
    curves=[Curve(128, [1, 2], [0.5, 0.75])],
)


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    plain = Run(**{**vars(RUN), "method": "ar", "first_difference": None})
    results = Results(**{**vars(RESULTS), "runs": [plain, RUN]})
    JsonFile(tmp_path / "out.json").write(results)
    assert read_json(tmp_path / "out.json") == results


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old", encoding="utf-8")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    results = Results(**{**vars(RESULTS), "runs": []})
    with pytest.raises(OSError, match="No space"):
        JsonFile(path).write(results)
    assert path.read_text(encoding="utf-8") == "old"


def test_a_file_that_is_briefly_locked_is_replaced_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, locked = Path.replace, [True, True]

    def replace_if_free(new: Path, path: Path) -> Path:
        if locked and locked.pop():
            raise PermissionError(13, "The process cannot access the file")
        return replace(new, path)

    monkeypatch.setattr(Path, "replace", replace_if_free)
    JsonFile(tmp_path / "out.json").write(RESULTS, summary=False)
    assert read_json(tmp_path / "out.json").runs == [RUN]
    assert locked == []


def test_a_device_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--json", "/dev/null"]) == 2
    assert "cannot write --json /dev/null: it is a device" in capsys.readouterr().err
