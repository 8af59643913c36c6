"""The benchmark as a whole, on a tiny model, and its JSON file, which is readable at all times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.target import Output, Sampler
from batching.tree import TokenTree
from speculation.bench import __main__ as bench
from speculation.bench import run as bench_run
from speculation.bench.json_file import check_writable, write_json
from speculation.bench.prompt_file import Prompt
from speculation.bench.results import Curve, Difference, Skipped
from speculation.bench.run import Plan, generate, measure, plain_logits
from speculation.bench.suites import suite
from speculation.drafter import MethodSpec
from speculation.engine import Engine
from speculation.methods import METHODS, parse_method
from speculation.reply import Reply
from speculation.sampling import SamplingParams
from tests.speculation.bench.runs import PROMPTS, results, run
from tests.support.paths import ROOT

EXACT = ["--threads", "1", "--kv-type", "f32", "--flash-attn", "off"]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS, encoding="utf-8")
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


class Wrong:
    """A verifier that is not lossless: it takes the second best token at every step."""

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        return [0], int(np.argsort(output.logits(0))[-2])


@pytest.fixture
def wrong_method(monkeypatch: pytest.MonkeyPatch) -> str:
    spec = MethodSpec("wrong", "", lambda *_: None, verifier=lambda *_: Wrong())
    monkeypatch.setitem(METHODS._specs, "wrong", spec)
    return "wrong"


def short_run(model: Path, prompts: str, n_predict: int = 3, method: str = "ar") -> list[str]:
    """The flags of a benchmark of one method."""
    flags = ["--model", str(model), "--prompts", prompts, "--n-predict", str(n_predict)]
    return [*flags, "--methods", method]


def bench_json(path: Path, arguments: Sequence[str], code: int = 0) -> dict[str, Any]:
    """The JSON of a benchmark that ends with ``code``."""
    assert bench.main([*arguments, *EXACT, "--json", str(path)]) == code
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_the_json_contains_every_run_of_every_method(
    tiny_model: Path, prompt_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*short_run(tiny_model, prompt_file, 12, "prompt-lookup"), "jacobi:guesses=4"]
    document = bench_json(tmp_path / "out.json", [*flags, "--repeat", "2"])
    assert list(document) == [
        *("model", "device", "settings", "started", "complete"),
        *("runs", "curves", "summary", "skipped"),
    ]
    assert document["complete"] is True
    assert document["model"]["file"] == tiny_model.name
    assert document["model"]["n_params"] > 0
    assert document["device"]["threads"] == 1
    assert any(device.startswith("cpu: ") for device in document["device"]["devices"])
    assert document["settings"]["methods"] == ["ar", "prompt-lookup", "jacobi:guesses=4"]
    assert document["settings"]["kv_type"] == "f32"
    assert document["skipped"] == []

    runs = document["runs"]
    assert [(run["prompt_id"], run["repeat"], run["method"]) for run in runs] == [
        (prompt_id, repeat, method)
        for prompt_id in ("c1", "c1#2", "d1")
        for repeat in (0, 1)
        for method in ("ar", "prompt-lookup", "jacobi:guesses=4")
    ]
    for one in runs:
        assert set(one) >= {
            *("method", "prompt_id", "category", "tokens", "n_steps", "n_drafted", "n_accepted"),
            *("prefill_seconds", "decode_seconds", "phase_seconds", "same_as_ar"),
            "first_difference",
        }
        assert len(one["tokens"]) == one["n_tokens"] <= 12
        assert set(one["phase_seconds"]) == {"draft", "build", "decode", "verify", "commit"}
        assert (one["same_as_ar"], one["first_difference"]) == (True, None)
        assert one["method"] != "ar" or one["n_drafted"] == 0
    assert {row["category"] for row in document["summary"]} == {"cats", "dogs", "all"}
    assert len(document["summary"]) == 9

    shown = capsys.readouterr()
    assert "every text identical to plain decoding (18 runs)" in shown.out
    assert "\x1b" not in shown.out + shown.err
    assert "18/18" in shown.err


def test_a_text_that_differs_is_reported_with_its_logit_gap(
    tiny_model: Path,
    prompt_file: str,
    tmp_path: Path,
    wrong_method: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = short_run(tiny_model, prompt_file, 4, wrong_method)
    document = bench_json(tmp_path / "out.json", flags)
    found = [run["first_difference"] for run in document["runs"] if run["method"] == "wrong"]
    assert [at["index"] for at in found] == [0, 0, 0]
    assert all(at["logit_gap"] > 0 and at["ar_token"] != at["token"] for at in found)
    assert [row["n_different"] for row in document["summary"]] == [0, 2, 0, 1, 0, 3]
    assert "3 of 6 runs differ from plain decoding" in capsys.readouterr().out


def test_plain_logits_are_those_that_plain_decoding_chose_from(engine: Engine) -> None:
    prompt = engine.model.tokenize("the cat saw a dog")
    tokens = engine.generate(prompt, method="ar", max_tokens=6).run().token_ids
    assert [
        int(plain_logits(engine, prompt, tokens[:n]).argmax()) for n in range(len(tokens))
    ] == tokens


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Reply, int]]:
    """What is generated: the method, the text, and tokens in the memory then."""
    found: list[tuple[str, Reply, int]] = []

    def recorded(engine: Engine, *arguments: Any) -> Reply:
        text = generate(engine, *arguments)
        found.append((str(text.method), text, len(engine.resources.memory.index.tokens)))
        return text

    monkeypatch.setattr(bench_run, "generate", recorded)
    return found


def test_later_turns_follow_plain_decodings_replies_for_every_method(
    engine: Engine, wrong_method: str, written: list[tuple[str, Reply, int]]
) -> None:
    methods = [parse_method(name) for name in (wrong_method, "ar")]
    plan = Plan(methods, SamplingParams(), 6)
    list(measure(engine, [Prompt("c", "cats", ("the cat", "a dog"))], plan))
    (wrong, plain), later = written[:2], {name: text for name, text, _ in written[2:]}
    assert (wrong[0], plain[0]) == ("wrong", "ar")
    assert plain[1].text != wrong[1].text
    assert later["wrong"].prompt == later["ar"].prompt
    text = engine.model.detokenize(later["ar"].prompt).decode()
    assert f"<|assistant|>{plain[1].text}<|end|>" in text


def test_all_methods_and_repeats_of_a_turn_have_the_same_memory(
    engine: Engine, written: list[tuple[str, Reply, int]]
) -> None:
    prompts = [Prompt(name, "cats", ("the cat saw a dog",)) for name in ("first", "again")]
    methods = [parse_method(name) for name in ("ar", "suffix", "suffix:branches=3")]
    plan = Plan(methods, SamplingParams(), 40, repeat=2)
    engine.resources.memory.clear()
    rounds = measure(engine, prompts, plan)
    runs = [run for done in rounds if isinstance(done, list) for run in done]
    sizes = [size for *_, size in written]
    assert set(sizes[:6]) == {0}
    assert len(set(sizes[6:])) == 1 and sizes[6] > 0
    cold, warm = (
        [run.stats.n_steps for run in runs if run.prompt_id == name and run.method == "suffix"]
        for name in ("first", "again")
    )
    assert max(warm) < min(cold)


def test_every_run_prefills_its_whole_prompt_and_raw_ones_without_a_template(
    engine: Engine, written: list[tuple[str, Reply, int]]
) -> None:
    methods = [parse_method(name) for name in ("ar", "jacobi")]
    plan = Plan(methods, SamplingParams(), 3, raw=True, repeat=2)
    list(measure(engine, [Prompt("c", "cats", ("the cat",))], plan))
    seen = [(list(text.prompt), text.stats.n_reused) for _, text, _ in written]
    assert seen == [(engine.model.tokenize("the cat"), 0)] * 4


def test_turns_too_long_for_the_context_are_skipped_and_named(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, turns = tmp_path / "prompts.jsonl", ["the cat", "cat " * 100, "a dog"]
    first = json.dumps({"question_id": "a", "turns": turns})
    path.write_text(first + '\n{"prompt": "a cat"}\n', encoding="utf-8")
    flags = [*short_run(tiny_model, str(path), 40), "--ctx", "256"]
    document = bench_json(tmp_path / "out.json", flags)
    assert [run["prompt_id"] for run in document["runs"]] == ["a", "line-2"]
    assert [turn["prompt_id"] for turn in document["skipped"]] == ["a#2", "a#3"]
    shown = capsys.readouterr()
    assert "2 prompts skipped, too long for the context: a#2, a#3" in shown.out
    assert "a#2 is skipped: " in shown.err
    assert "exceed the context of 256; raise --ctx to " in shown.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ["--n-predict", "999"],
            "none of the 2 prompts leaves room for 999 tokens in a context of 512; "
            "raise --ctx or lower --n-predict",
        ),
        (["--prompt", ""], "--prompt is empty; give a text"),
    ],
)
def test_prompts_that_are_empty_or_leave_no_room_are_an_error(
    tiny_model: Path, prompt_file: str, capsys: Any, flags: list[str], reason: str
) -> None:
    prompts = [] if "--prompt" in flags else ["--prompts", prompt_file]
    assert bench.main(["--model", str(tiny_model), *prompts, *flags, *EXACT]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {reason}"


def test_ctrl_c_while_results_are_shown_names_their_file(
    tiny_model: Path,
    prompt_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "differences", interrupted)
    arguments = short_run(tiny_model, prompt_file)
    path = tmp_path / "out.json"
    assert bench_json(path, arguments, code=130)["complete"] is True
    assert capsys.readouterr().err.splitlines()[-2:] == [f"results saved in {path}", "interrupted"]


def test_ctrl_c_shows_and_keeps_the_finished_runs(
    tiny_model: Path,
    prompt_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*arguments: Any) -> Any:
        for n, item in enumerate(measure(*arguments)):
            if n == 2:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(suite, "measure", interrupted)
    arguments = short_run(tiny_model, prompt_file)
    document = bench_json(tmp_path / "out.json", arguments, code=130)
    assert [run["prompt_id"] for run in document["runs"]] == ["c1", "c1#2"]
    assert document["complete"] is False
    assert "cats: 2 prompts" in capsys.readouterr().out


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


# Its output pipe is closed, and its picture is an empty file.
UNREAD = """
import os, sys
from pathlib import Path
from speculation.bench import __main__ as bench
bench.write_plot = lambda file, *_: Path(file).touch()
bench.check_plot = lambda file: None
reader, writer = os.pipe()
os.dup2(writer, 1)
def differences(*_):
    os.close(reader)
    return ""
bench.differences = differences
sys.exit(bench.main(sys.argv[1:]))
"""


@pytest.fixture
def flags(tiny_model: Path, prompt_file: str, out: Path) -> list[str]:
    short = [*short_run(tiny_model, prompt_file, 6), "jacobi"]
    return [*short, "--threads", "1", "--kv-type", "f32", "--json", str(out)]


def run_program(code: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is left is written at exit
    command = [sys.executable, "-c", code, *flags]
    return subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True)


def test_a_killed_benchmark_keeps_the_finished_rounds(flags: list[str], out: Path) -> None:
    assert run_program(KILLED, flags).returncode == -signal.SIGKILL
    kept = json.loads(out.read_text(encoding="utf-8"))
    runs = [(one["prompt_id"], one["method"]) for one in kept["runs"]]
    assert runs == [("c1", "ar"), ("c1", "jacobi")]
    assert kept["complete"] is False


def test_a_closed_pipe_loses_neither_results_nor_picture(
    flags: list[str], out: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.svg"
    done = run_program(UNREAD, [*flags, "--plot", str(picture)])
    assert done.returncode == 2
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["complete"] is True
    assert picture.exists()


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


RESULTS = results(
    run("ar", "p", 2, 1.0),
    run("auto", "p", 2, 1.0, first_difference=Difference(1, 7, None, None)),
    skipped=[Skipped("a", "chat", "long")],
    curves=[Curve(128, [1, 2], [0.5, 0.75])],
)


def test_a_file_of_ours_is_replaced_and_has_a_line_for_each_result(out: Path) -> None:
    for written in (replace(RESULTS, complete=False), RESULTS):
        write_json(str(out), written)
    check_writable(str(out))
    text = out.read_text(encoding="utf-8")
    document = json.loads(text)
    assert document["complete"] is True
    assert document["curves"] == [{"n_past": 128, "sizes": [1, 2], "seconds": [0.5, 0.75]}]
    assert document["runs"][1]["first_difference"]["ar_token"] == 7
    assert json.dumps(document["runs"][1]) in text.splitlines()


def test_a_failed_write_leaves_the_old_file(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.write_text("old", encoding="utf-8")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(str(out), RESULTS)
    assert out.read_text(encoding="utf-8") == "old"
