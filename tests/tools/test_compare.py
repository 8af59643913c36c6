"""The comparison: reading llama.cpp's programs, taking turns with them, listing failures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter
from batching.llama.library import library_folder
from batching.llama.model import Model
from speculation.bench.prompt_file import Prompt
from speculation.methods import parse_method
from tools.compare import __main__ as bench
from tools.compare import programs
from tools.compare.mode import choose, draft_flags, libraries_line
from tools.compare.pairs import (
    Comparison,
    Failure,
    Pair,
    prompt_text,
    same_text,
    tasks,
    window_mismatch,
)
from tools.compare.programs import (
    PROGRAMS,
    Figures,
    ProgramFailed,
    Settings,
    read,
    unlike_libraries,
)
from tools.compare.report import failures, table

LOOKUP = b"""\
0.00.017.890 I cmn          init: llama threadpool init, n_threads = 1
0.00.036.781 I encoded    5 tokens in    0.002 seconds, speed: 2320.855 t/s
0.00.036.804 I decoded   33 tokens in    0.015 seconds, speed: 2200.000 t/s
0.00.036.820 I
0.00.036.835 I n_draft      = 3
0.00.036.851 I n_predict    = 33
"""
LOOKAHEAD = b"""\
0.00.355.485 I encoded    5 tokens in    0.002 seconds, speed: 2252.252 t/s
0.00.355.504 I decoded   33 tokens in    0.328 seconds, speed:  100.755 t/s
0.00.355.518 I
0.00.355.531 I W = 15
0.00.355.544 I N =  5
0.00.355.557 I G = 15
0.00.355.570 I
0.00.355.583 I n_predict = 33
"""
BENCH = b"""[
  { "build_commit": "0c1e570", "n_gen": 16, "n_depth": 4, "avg_ts": 2540.027124,
    "samples_ts": [ 2488.34 ] }
]
"""
SETTINGS = Settings(Path("m.gguf"), 512, 2, "f16", flash_attn=True)


# Reading a program's output


def test_the_first_token_of_llama_lookup_is_not_counted() -> None:
    figures = read(PROGRAMS["prompt-lookup"], b"\n\n<s>Once upon\n\n", LOOKUP, 5)
    assert figures is not None
    assert (figures.n_prompt, figures.n_tokens) == (5, 32)
    assert figures.tokens_per_second == pytest.approx(2200 * 32 / 33)
    assert figures.window == {}


def test_the_window_is_read_from_llama_lookaheads_output() -> None:
    printed = b"Once \x1b[0;96mupon\x1b[0m a"
    figures = read(PROGRAMS["lookahead"], printed, LOOKAHEAD, 5)
    assert figures is not None
    assert (figures.n_tokens, figures.tokens_per_second) == (33, 100.755)
    assert figures.window == {"W": 15, "N": 5, "G": 15}
    assert figures.text == b"Once upon a"


def test_llama_bench_prints_its_figures_as_json() -> None:
    figures = read(PROGRAMS["ar"], BENCH, b"", 5)
    assert figures is not None
    assert (figures.n_prompt, figures.n_tokens, figures.tokens_per_second) == (5, 16, 2488.34)
    assert figures.text is None


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "lookahead", "draft"])
@pytest.mark.parametrize("printed", [b"", b"\n\n<s>Once upon", LOOKUP[:90], b"[]", b"{"])
def test_a_program_without_a_complete_log_gives_no_figures(method: str, printed: bytes) -> None:
    assert read(PROGRAMS[method], printed, b"", 5) is None


# Starting a program


def arguments(method: str, settings: Settings = SETTINGS, more: tuple[str, ...] = ()) -> str:
    line = programs.command(
        PROGRAMS[method],
        Path("dir/x"),
        settings,
        prompt_file=Path("p.txt"),
        n_prompt=40,
        n_tokens=64,
        more=more,
    )
    return " ".join(line[1:])


def test_programs_get_our_settings_and_the_prompt_unchanged() -> None:
    assert arguments("prompt-lookup") == (
        "-m m.gguf -t 2 -ngl 999 -fa on -ctk f16 -ctv f16 -tb 2 -c 512 "
        "-bf p.txt --no-escape -n 63 --temp 0 --samplers top_k --top-k 1"
    )
    assert " -n 62 " in arguments("lookahead")  # two tokens fewer
    # llama-bench decodes what follows the prompt and the first token.
    assert arguments("ar", Settings(Path("m.gguf"), 512, 1, "f32", False, 0)) == (
        "-m m.gguf -t 1 -ngl 0 -fa off -ctk f32 -ctv f32 -p 0 -n 63 -d 40 -r 1 -o json"
    )


def test_both_programs_draft_with_the_same_settings() -> None:
    drafts = {"draft": Path("small.gguf"), "eagle-3": Path("head.gguf")}
    settings = Settings(Path("m.gguf"), 512, 2, "f16", True, None, drafts)
    line = arguments("draft", settings, more=("--spec-draft-n-max", "8"))
    assert " -n 63 " in line
    assert line.endswith(
        "-md small.gguf --spec-type draft-simple -td 2 -tbd 2 -ngld 999 -ctkd f16 -ctvd f16 "
        "--spec-draft-n-max 8"
    )
    assert " -md head.gguf --spec-type draft-eagle3 " in arguments("eagle-3", settings)
    assert " --spec-type draft-dflash " in arguments("dflash", settings)
    line = arguments("mtp", settings)  # the model's own layer
    assert " --spec-type draft-mtp " in line
    assert "-md" not in line
    assert draft_flags(parse_method("lookahead")) == []
    assert draft_flags(parse_method("mtp:depth=3,p_min=0.5")) == [
        *("--spec-draft-n-max", "3"),
        *("--spec-draft-p-min", "0.5"),
    ]


def test_programs_find_their_libraries_and_ignore_settings_in_the_environment() -> None:
    outer = {"LLAMA_ARG_THREADS": "7", "HOME": "h", "LD_LIBRARY_PATH": "/usr/lib"}
    inner = programs.environment(Path("dir"), outer)
    assert "LLAMA_ARG_THREADS" not in inner
    assert inner["HOME"] == "h"
    if sys.platform == "linux":
        assert inner["LD_LIBRARY_PATH"] == f"dir{os.pathsep}/usr/lib"


# Prompts


def test_first_turns_are_compared_with_one_bos_and_long_ones_are_skipped(tiny_model: Path) -> None:
    prompts = [Prompt("a", "cats", ("the cat", "a dog")), Prompt("b", "cats", ("cat " * 200,))]
    with Model(tiny_model) as model:
        assert model.add_bos
        text = prompt_text(model, "the cat", raw=False)
        assert text == "<|user|>the cat<|end|><|assistant|>"
        assert prompt_text(model, "the cat", raw=True) == "the cat"
        [task], skipped = tasks(model, prompts, raw=False, n_ctx=512, n_predict=8)
        assert (task.prompt_id, task.tokens.count(1)) == ("a", 1)
    assert [turn.prompt_id for turn in skipped] == ["b"]
    assert skipped[0].reason.endswith("the context has 512; raise --ctx")


# Comparing


def test_texts_are_compared_up_to_the_end_of_the_shorter() -> None:
    assert same_text(b"\n\n<s>Once upon a time\n\n", b"<s>Once upon a")
    assert same_text(b"<s>Once upon", b"<s>Once upon a")
    assert not same_text(b"<s>Once upon the time", b"<s>Once upon a")


def test_a_different_window_is_not_compared() -> None:
    window = {"W": 15, "N": 5, "G": 15}
    other = "it was compiled with W=15, N=5, G=15, but the method has W=7, N=5, G=15"
    for printed, method, expected in (
        (window, "lookahead", None),
        (window, "lookahead:window=7", other),
        ({"W": 15}, "lookahead", None),
        ({}, "prompt-lookup", None),
    ):
        assert window_mismatch(printed, parse_method(method)) == expected


def comparison(method: str, *ratios: float, **more: Any) -> Comparison:
    pairs = [
        Pair(f"p{i}", 0, "ours", Figures(5, 10, 50 * r), Figures(5, 10, 50.0), i > 0)
        for i, r in enumerate(ratios)
    ]
    parsed = parse_method(method)
    return Comparison(parsed, PROGRAMS[parsed.name], Path("x"), pairs=pairs, **more)


def test_the_table_has_the_median_ratio_and_its_spread() -> None:
    failed = [Failure("p9", 0, "llama-lookup ran 10 times without printing its speed")]
    shown = table(
        [comparison("lookahead", 0.9, 1.1, 1.02), comparison("prompt-lookup", failures=failed)]
    )
    assert shown.rows == [
        [
            *("lookahead", "llama-lookahead", "3", "1.020 (0.900 to 1.100)"),
            *("51.0", "50.0", "2 of 3"),
        ],
        ["prompt-lookup", "llama-lookup", "0 of 1", "failed", "–", "–", "–"],
    ]


def test_every_failure_is_listed() -> None:
    failed = [Failure(f"p{i}", 0, "ended") for i in range(12)]
    compared = [comparison("lookahead", 1.0), comparison("ar", failures=failed)]
    assert failures(compared).splitlines() == [
        "12 of 13 pairs failed and are excluded from the ratios:",
        *(f"  ar  p{i}: ended" for i in range(10)),
        "  and 2 more; --json saves them all",
        "given up after three failures: ar",
    ]
    assert failures(compared[:1]) == ""


def test_libraries_are_the_same_only_if_their_bytes_are(tmp_path: Path) -> None:
    assert any(path.name.startswith(("libllama", "llama")) for path in library_folder().iterdir())
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        for name in ("libllama.so", "libggml-cpu.so", "libllama.so.0", "libmtmd.so"):
            (folder / name).write_bytes(name.encode())
    (theirs / "libmtmd.so").write_bytes(b"not used")
    assert unlike_libraries(ours, theirs) == []
    assert libraries_line([], theirs) == "libraries: identical on both sides"
    (theirs / "libggml-cpu.so").write_bytes(b"other")
    (theirs / "libggml-cuda.so").write_bytes(b"new")
    unlike = unlike_libraries(ours, theirs)
    assert unlike == ["libggml-cpu.so", "libggml-cuda.so"]
    line = libraries_line(unlike, theirs)
    assert "NOT the same build (libggml-cpu.so, libggml-cuda.so differ)" in line
    assert f"LLAMA_CPP_LIB_PATH={theirs}" in line
    assert unlike_libraries(ours, tmp_path) is None


# What can be compared


def test_methods_that_cannot_be_compared_are_listed_and_the_rest_run(fake_programs: Path) -> None:
    methods = [parse_method(name) for name in ("jacobi", "lookahead", "prompt-lookup")]
    (fake_programs / "llama-lookahead").unlink()
    found, left_out = choose(methods, fake_programs)
    assert [str(one.method) for one in found] == ["prompt-lookup"]
    assert left_out == [
        "jacobi (llama.cpp has no program for it)",
        f"lookahead ({fake_programs} has no executable llama-lookahead)",
    ]


def test_a_folder_without_any_program_is_an_error(tmp_path: Path) -> None:
    for folder, reason in (
        (tmp_path, r"nothing can be compared.*has no executable llama-bench"),
        (tmp_path / "none", "none is not a folder; give that of"),
    ):
        with pytest.raises(InvalidParameter, match=reason):
            choose([parse_method("ar")], folder)


@pytest.mark.parametrize("flags", [["--temperature", "1"], ["--suite", "cost"], ["--report", "r"]])
def test_flags_that_make_no_sense_in_a_comparison_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["d", *flags])
    assert f"unrecognized arguments: {flags[0]}" in capsys.readouterr().err


# The whole comparison, with shell scripts in place of the programs

FAKE = """#!/bin/sh
flags=$*
while [ $# -gt 0 ]; do
  case "$1" in -bf) prompt=$2 ;; --version) echo "version: 7 (fake)" >&2; exit ;; esac
  shift
done
"""
SHOW = """printf '<s>'; cat "$prompt"
echo "0.00.1 I encoded   {n_prompt} tokens in    0.002 seconds, speed: 2000.000 t/s" >&2
echo "0.00.1 I decoded   9 tokens in    0.020 seconds, speed: 450.000 t/s" >&2
"""
FORGETS = """if [ ! -e "$0.ran" ]; then touch "$0.ran"; exit; fi
"""
PROMPT = "the cat saw a dog"


def put(folder: Path, name: str, body: str) -> None:
    """Write a program into ``folder``, replacing one of the same name."""
    (folder / name).write_text(FAKE + body, encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.fixture
def fake_programs(tmp_path: Path, tiny_model: Path) -> Path:
    """llama-bench, llama-lookup (which prints nothing at first) and llama-lookahead."""
    if os.name != "posix":
        pytest.skip("shell scripts stand in for the programs")
    folder = tmp_path / "bin"
    folder.mkdir()
    with Model(tiny_model) as model:
        n_prompt = len(model.tokenize(PROMPT, parse_special=True))
    show = SHOW.format(n_prompt=n_prompt)
    put(folder, "llama-bench", 'echo \'[{"n_gen": 12, "samples_ts": [500.0]}]\'\n')
    put(folder, "llama-lookup", FORGETS + show)
    put(folder, "llama-lookahead", show + 'echo "W = 15\nN =  5\nG = 15" >&2\n')
    return folder


def compare(folder: Path, model: Path, out: Path, *more: str) -> dict[str, Any]:
    """The JSON of a comparison on one prompt."""
    flags = ["--model", str(model), "--raw", "--prompt", PROMPT, "--n-predict", "12"]
    flags += ["--threads", "1", "--flash-attn", "off", "--json", str(out), *more]
    assert bench.main([str(folder), *flags]) == 0
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


def test_each_method_and_its_program_take_turns_going_first(
    fake_programs: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = compare(fake_programs, tiny_model, tmp_path / "out.json", "--repeat", "4")
    compared = {one["method"]: one for one in document["compare_llama_cpp"]}
    assert list(compared) == ["ar", "prompt-lookup", "lookahead"]
    for one in compared.values():
        assert one["failures"] == []
        assert [pair["first"] for pair in one["pairs"]] == ["theirs", "ours", "theirs", "ours"]
        assert all(pair["ratio"] > 0 for pair in one["pairs"])
    assert {pair["theirs"]["tokens_per_second"] for pair in compared["ar"]["pairs"]} == {500.0}
    assert {pair["ours"]["n_tokens"] for pair in compared["ar"]["pairs"]} == {11}
    lookup = compared["prompt-lookup"]["pairs"][0]
    theirs = lookup["theirs"]
    assert (theirs["n_tokens"], theirs["tokens_per_second"]) == (8, 400.0)
    assert lookup["ours"]["n_tokens"] < 12  # the first step does not count
    assert lookup["same_text"] is True
    assert document["llama_cpp"] == {"version": "7 (fake)", "unlike": None}
    assert document["model"]["file"] == tiny_model.name
    assert str(tmp_path) not in (tmp_path / "out.json").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "ours ÷ llama.cpp's own programs" in shown
    assert "so its build cannot be compared" in shown


def test_a_draft_model_adds_its_method_to_the_comparison(
    fake_programs: Path, tiny_model: Path, tmp_path: Path
) -> None:
    shows = (fake_programs / "llama-lookahead").read_text(encoding="utf-8").removeprefix(FAKE)
    put(fake_programs, "llama-speculative-simple", 'echo "$flags" >"$0.flags"\n' + shows)
    flags = ["--draft-model", str(tiny_model), "--methods", "prompt-lookup"]
    document = compare(fake_programs, tiny_model, tmp_path / "out.json", *flags)
    lookup, draft = document["compare_llama_cpp"]
    assert (lookup["method"], draft["method"]) == ("prompt-lookup", "draft")
    assert len(draft["pairs"]) == 1
    assert document["settings"]["draft_model"] == tiny_model.name
    given = (fake_programs / "llama-speculative-simple.flags").read_text(encoding="utf-8")
    params = parse_method("draft").params
    assert f"-md {tiny_model} --spec-type draft-simple" in given
    assert f"--spec-draft-n-max {params.draft_max} " in given
    assert f"--spec-draft-p-min {params.p_min}" in given


DRAFT_TREE = "draft:width=2 (llama.cpp drafts a chain, not a tree)"
EAGLE_TREE = "eagle-3 (llama.cpp drafts a chain, not a tree)"


@pytest.mark.parametrize(
    ("methods", "loaded", "chosen", "left_out"),
    [
        ("ar draft", "", "ar", ["draft (give --draft-model)"]),
        ("ar draft draft:width=2", "draft", "ar draft", [DRAFT_TREE]),
        ("ar eagle-3", "mtp eagle-3", "ar mtp", [EAGLE_TREE]),
        ("ar", "mtp eagle-3", "ar mtp eagle-3:top_k=1", []),
        (
            "ar mtp eagle-3:top_k=1",
            "",
            "ar",
            [
                "mtp (give a model that has layers for it, or --heads)",
                "eagle-3:top_k=1 (give --heads)",
            ],
        ),
    ],
)
def test_loaded_drafts_are_compared_as_chains(
    fake_programs: Path, methods: str, loaded: str, chosen: str, left_out: list[str]
) -> None:
    put(fake_programs, "llama-speculative-simple", "true\n")
    asked = [parse_method(name) for name in methods.split()]
    found, missing = choose(asked, fake_programs, loaded.split())
    assert (" ".join(str(one.method) for one in found), missing) == (chosen, left_out)


def test_a_program_that_never_shows_figures_is_reported_and_abandoned(
    fake_programs: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(fake_programs, "llama-lookup", 'echo x >>"$0.runs"\n')
    put(fake_programs, "llama-lookahead", "echo 'E error: no such thing' >&2; exit 3\n")
    put(fake_programs, "llama-bench", 'echo \'[{"n_gen": 12, "samples_ts": [9.0]}]\'\n')
    document = compare(fake_programs, tiny_model, tmp_path / "out.json", "--repeat", "5")
    bench_, lookup, lookahead = document["compare_llama_cpp"]
    assert len(bench_["pairs"]) == 5
    assert (lookup["pairs"], lookup["ratio_median"]) == ([], None)
    assert {failure["reason"] for failure in lookup["failures"]} == {
        "llama-lookup ran 10 times without printing its speed"
    }
    assert len(lookup["failures"]) == 3
    assert len((fake_programs / "llama-lookup.runs").read_text().splitlines()) == 30
    assert {failure["reason"] for failure in lookahead["failures"]} == {
        "llama-lookahead exited with code 3: E error: no such thing"
    }
    shown = capsys.readouterr().out
    assert "6 of 11 pairs failed and are excluded from the ratios:" in shown
    assert "given up after three failures: prompt-lookup, lookahead" in shown


def test_a_prompt_that_the_program_tokenizes_differently_is_not_compared(
    fake_programs: Path,
) -> None:
    put(fake_programs, "llama-lookup", SHOW.format(n_prompt=77))
    with pytest.raises(ProgramFailed, match="read 77 prompt tokens instead of 5"):
        programs.run(PROGRAMS["prompt-lookup"], [str(fake_programs / "llama-lookup")], 5)
