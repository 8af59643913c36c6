"""The benchmark as a whole, on a tiny model, and its JSON file, which is readable at all times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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
Flags = Callable[..., list[str]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def flags(tiny_model: Path, tmp_path: Path, out: Path) -> Flags:
    """The flags of a benchmark, some of whose methods and numbers of tokens may be given."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS, encoding="utf-8")

    def of(methods: str = "ar", n_predict: int = 3, *more: str) -> list[str]:
        files = ["--model", str(tiny_model), "--prompts", str(prompts), "--json", str(out)]
        return [
            *(*files, *EXACT, "--n-predict", str(n_predict)),
            *("--methods", *methods.split(), *more),
        ]

    return of


def read(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


class Wrong:
    """A verifier that is not lossless: it takes the second best token at every step."""

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        return [0], int(np.argsort(output.logits(0))[-2])


@pytest.fixture
def wrong_method(monkeypatch: pytest.MonkeyPatch) -> str:
    spec = MethodSpec("wrong", "", lambda *_: None, verifier=lambda *_: Wrong())
    monkeypatch.setitem(METHODS._specs, "wrong", spec)
    return "wrong"


def test_the_json_contains_every_run_of_every_method(
    flags: Flags, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(flags("prompt-lookup jacobi:guesses=4", 12, "--repeat", "2")) == 0
    document = read(out)
    methods = ["ar", "prompt-lookup", "jacobi:guesses=4"]
    assert " ".join(document) == (
        "model device settings started complete runs curves summary skipped"
    )
    assert (document["complete"], document["skipped"]) == (True, [])
    assert document["model"]["file"] == "tiny.gguf" and document["model"]["n_params"] > 0
    assert document["device"]["threads"] == 1
    assert any(device.startswith("cpu: ") for device in document["device"]["devices"])
    settings = document["settings"]
    assert (settings["methods"], settings["kv_type"]) == (methods, "f32")
    runs = document["runs"]
    assert [(run["prompt_id"], run["repeat"], run["method"]) for run in runs] == [
        (prompt_id, repeat, method)
        for prompt_id in ("c1", "c1#2", "d1")
        for repeat in (0, 1)
        for method in methods
    ]
    for one in runs:
        assert set(one) >= {"category", "n_steps", "n_accepted", "prefill_seconds"}
        assert len(one["tokens"]) == one["n_tokens"] <= 12 and one["decode_seconds"] > 0
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
    flags: Flags, out: Path, wrong_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(flags(wrong_method, 4)) == 0
    document = read(out)
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
    flags: Flags, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = json.dumps({"question_id": "a", "turns": ["the cat", "cat " * 100, "a dog"]})
    text = first + '\n{"prompt": "a cat"}\n'
    (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
    assert bench.main(flags("ar", 40, "--ctx", "256")) == 0
    document = read(out)
    assert [run["prompt_id"] for run in document["runs"]] == ["a", "line-2"]
    assert [turn["prompt_id"] for turn in document["skipped"]] == ["a#2", "a#3"]
    shown = capsys.readouterr()
    assert "2 prompts skipped, too long for the context: a#2, a#3" in shown.out
    assert "a#2 is skipped: " in shown.err and "context of 256; raise --ctx to " in shown.err


@pytest.mark.parametrize(
    ("text", "n_predict", "prompt", "reason"),
    [
        ("", 999, [], "none of the 2 prompts leaves room for 999 tokens in a context of 512; "),
        ("", 3, ["--prompt", ""], "--prompt is empty; give a text"),
        # What is no benchmark is not overwritten.
        ('{"prompt": "Hi"}\n', 3, [], "exists and is not a benchmark's JSON"),
        ("GGUF", 3, [], "exists and is not a benchmark's JSON"),
        ('{"complete": true}', 3, [], "exists and is not a benchmark's JSON"),
    ],
)
def test_what_cannot_be_measured_or_saved_is_an_error(
    text: str, n_predict: int, prompt: list[str], reason: str, flags: Flags, out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = flags("ar", n_predict, *prompt)
    if prompt:
        del given[2:4]  # the file
    if text:
        out.write_text(text, encoding="utf-8")
    assert bench.main(given) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and reason in last
    assert not text or out.read_text(encoding="utf-8") == text


def test_ctrl_c_shows_and_keeps_the_finished_runs(
    flags: Flags, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> Iterator[Any]:
        for n, item in enumerate(measure(*arguments)):
            if n == 2:
                raise KeyboardInterrupt
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(suite, "measure", interrupted)
        assert bench.main(flags()) == 130
    document = read(out)
    assert [run["prompt_id"] for run in document["runs"]] == ["c1", "c1#2"]
    assert document["complete"] is False
    assert "cats: 2 prompts" in capsys.readouterr().out
    # While the results are shown.
    monkeypatch.setattr(bench, "differences", lambda *_: signal.raise_signal(signal.SIGINT))
    assert bench.main(flags()) == 130
    assert read(out)["complete"] is True
    assert capsys.readouterr().err.splitlines()[-2:] == [f"results saved in {out}", "interrupted"]


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


def run_program(code: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is left is written at exit
    command = [sys.executable, "-c", code, *flags]
    return subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True)


def test_a_killed_benchmark_keeps_the_finished_rounds(flags: Flags, out: Path) -> None:
    assert run_program(KILLED, flags("jacobi", 6)).returncode == -signal.SIGKILL
    kept = read(out)
    runs = [(one["prompt_id"], one["method"]) for one in kept["runs"]]
    assert runs == [("c1", "ar"), ("c1", "jacobi")]
    assert kept["complete"] is False


def test_a_closed_pipe_loses_neither_results_nor_picture(flags: Flags, out: Path) -> None:
    picture = out.with_name("picture.svg")
    done = run_program(UNREAD, flags("jacobi", 6, "--plot", str(picture)))
    assert done.returncode == 2
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr
    assert read(out)["complete"] is True
    assert picture.exists()


RESULTS = results(
    run("ar", "p", 2, 1.0),
    run("auto", "p", 2, 1.0, first_difference=Difference(1, 7, None, None)),
    skipped=[Skipped("a", "chat", "long")],
    curves=[Curve(128, [1, 2], [0.5, 0.75])],
)


def test_a_file_of_ours_is_replaced_as_a_whole(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for written in (replace(RESULTS, complete=False), RESULTS):
        write_json(str(out), written)
    check_writable(str(out))
    text, document = out.read_text(encoding="utf-8"), read(out)
    assert document["complete"] is True
    assert document["curves"] == [{"n_past": 128, "sizes": [1, 2], "seconds": [0.5, 0.75]}]
    assert document["runs"][1]["first_difference"]["ar_token"] == 7
    assert json.dumps(document["runs"][1]) in text.splitlines()
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_json(str(out), results())
    assert out.read_text(encoding="utf-8") == text
