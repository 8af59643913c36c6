"""The benchmark: prompt files, statistics, tables, and one run of it all on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.context import ContextParams, Output
from batching.errors import InvalidParameter
from batching.sampler import Sampler
from batching.tree import TokenTree
from speculation.bench import __main__ as bench
from speculation.bench.list_methods import list_methods
from speculation.bench.options import parse_options
from speculation.bench.prompt_file import (
    Prompt,
    PromptFileError,
    parse_prompts,
    read_prompts,
    select_prompts,
)
from speculation.bench.report import differences, skipped_turns, tables
from speculation.bench.results import Difference, Run, Skipped, first_difference
from speculation.bench.run import Plan, measure, plain_logits, with_baseline
from speculation.bench.suites import suite
from speculation.bench.summary import Row, summarise
from speculation.engine import Engine
from speculation.methods import METHODS, MethodKind, NoParams, parameter_docs, parse_method
from speculation.sampling import SamplingParams

PHASES = {"draft": 0.01, "build": 0.02, "decode": 0.4, "verify": 0.03, "commit": 0.04}


def run(
    method: str, prompt_id: str, n_tokens: int, seconds: float, category: str = "chat", **more: Any
) -> Run:
    """A run of ten steps with the fields that a test does not care about filled in."""
    fields: dict[str, Any] = {
        "repeat": 0,
        "n_prompt": 5,
        "tokens": list(range(n_tokens)),
        "n_steps": 10,
        "n_rows": 20,
        "n_drafted": 0,
        "n_accepted": 0,
        "prefill_seconds": 0.25,
        "decode_seconds": seconds,
        "phase_seconds": PHASES,
        "finish_reason": "length",
    }
    return Run(method=method, prompt_id=prompt_id, category=category, **{**fields, **more})


# Prompt files


def test_a_line_is_a_prompt_or_a_conversation() -> None:
    text = (
        '{"prompt": "Hi", "category": "a", "question_id": "one"}\n'
        '{"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "more": 1}\n'
    )
    assert parse_prompts(text, "p.jsonl") == [
        Prompt("one", "a", ("Hi",)),
        Prompt("81", "writing", ("Write.", "Shorter.")),
    ]


def test_a_prompt_without_a_name_is_called_by_its_line() -> None:
    assert parse_prompts('\n{"prompt": "Hi"}\r\n', "p.jsonl") == [
        Prompt("line-2", "prompts", ("Hi",))
    ]


def test_later_turns_have_their_number_in_the_id() -> None:
    prompt = Prompt("chat-03", "chat", ("a", "b"))
    assert [prompt.turn_id(1), prompt.turn_id(2)] == ["chat-03", "chat-03#2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{prompt: 1}", "this is no JSON"),
        ('["Hi"]', "this is no JSON object"),
        ('{"text": "Hi"}', 'neither "prompt" nor "turns"'),
        ('{"turns": []}', '"turns" must be a list of at least one text'),
        ('{"turns": "Hi"}', '"turns" must be a list of at least one text'),
        ('{"turns": ["Hi", 3]}', "a prompt must be text, and not empty"),
        ('{"prompt": ""}', "a prompt must be text, and not empty"),
        ('{"prompt": "Hi", "category": 3}', "category must be text"),
        ('{"prompt": "Hi", "question_id": "x"}', "the question_id 'x' is taken by line 1"),
    ],
)
def test_a_wrong_line_is_named_with_its_file(line: str, reason: str) -> None:
    text = f'{{"prompt": "Hi", "question_id": "x"}}\n{line}\n'
    with pytest.raises(PromptFileError) as caught:
        parse_prompts(text, "folder/p.jsonl")
    assert str(caught.value).startswith("folder/p.jsonl, line 2: ")
    assert reason in str(caught.value)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"cannot read the prompts .*none\.jsonl"):
        read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(PromptFileError, match=r"p\.jsonl holds no prompts"):
        parse_prompts("\n", "p.jsonl")


def test_ten_builtin_prompts_come_in_each_of_eight_categories() -> None:
    counts: dict[str, int] = {}
    for prompt in read_prompts("builtin"):
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
    assert counts == {
        "summarise": 10,
        "context-qa": 10,
        "edit-code": 10,
        "chat": 10,
        "extraction": 10,
        "writing": 10,
        "rewriting": 10,
        "arithmetic": 10,
    }


def test_the_limit_counts_the_prompts_of_each_category() -> None:
    prompts = [Prompt(name, name[0], ("x", "y")) for name in ("a1", "b1", "a2", "b2", "a3", "c1")]
    assert [p.id for p in select_prompts(prompts, None, 2)] == ["a1", "b1", "a2", "b2", "c1"]
    assert [p.id for p in select_prompts(prompts, ["a", "c"], 1)] == ["a1", "c1"]
    assert [p.id for p in select_prompts(prompts, ["b"], None)] == ["b1", "b2"]


def test_an_unknown_category_is_named_with_those_there_are() -> None:
    prompts = [Prompt("1", "chat", ("x",)), Prompt("2", "writing", ("x",))]
    with pytest.raises(InvalidParameter, match="'chta'; did you mean chat.* chat, writing"):
        select_prompts(prompts, ["chta"], None)


# Comparing texts


@pytest.mark.parametrize(
    ("ar_tokens", "tokens", "index"),
    [
        ([5, 6, 7], [5, 6, 7], None),
        ([5, 6, 7], [5, 9, 7], 1),
        ([5, 6, 7], [5, 6], 2),
        ([5], [5, 6, 7], 1),
        ([], [], None),
    ],
)
def test_the_first_difference_is_where_tokens_or_ends_differ(
    ar_tokens: list[int], tokens: list[int], index: int | None
) -> None:
    assert first_difference(ar_tokens, tokens) == index


# Statistics


def test_speed_ups_are_ratios_of_medians_averaged_over_prompts() -> None:
    runs = [
        # prompt p: medians 10 and 20 tokens/s; prompt q: 20 and 80
        run("ar", "p", 10, 1.0),
        run("ar", "p", 10, 0.5),
        run("ar", "p", 10, 2.0),
        run("jacobi", "p", 10, 0.5),
        run("jacobi", "p", 10, 0.1),
        run("jacobi", "p", 10, 5.0),
        run("ar", "q", 10, 0.5),
        run("jacobi", "q", 20, 0.25),
    ]
    row = summarise(runs)[1]
    assert (row.category, row.method, row.n_prompts, row.n_runs) == ("chat", "jacobi", 2, 4)
    assert row.speed_up_mean == 3.0  # of 2 and 4
    assert row.speed_up_std == pytest.approx(1.4142135623730951)
    assert row.tokens_per_second == pytest.approx(50 / 5.85)
    assert row.speed_up_overall == pytest.approx(50 / 5.85 / (40 / 4.0))


def test_a_single_prompt_has_no_standard_deviation() -> None:
    row = summarise([run("ar", "p", 10, 1.0)])[0]
    assert (row.speed_up_mean, row.speed_up_std) == (1.0, None)


def test_rates_and_times_are_of_all_steps_together() -> None:
    difference = Difference(3, 7, 8, 0.5)
    runs = [
        run("ar", "p", 10, 1.0),
        run("x", "p", 30, 1.0, n_drafted=40, n_accepted=20, prefill_seconds=0.1),
        run("ar", "q", 10, 1.0),
        run("x", "q", 10, 0.5, n_drafted=10, n_accepted=0, first_difference=difference),
    ]
    plain, row = summarise(runs)[:2]
    assert row.tokens_per_step == 2.0
    assert row.acceptance_rate == 0.4
    assert plain.acceptance_rate is None
    assert row.prefill_seconds == pytest.approx(0.175)
    assert row.phase_seconds == pytest.approx(
        {"draft": 0.001, "build": 0.002, "decode": 0.04, "verify": 0.003, "commit": 0.004}
    )
    assert row.outside_decode_seconds == pytest.approx(1.5 / 20 - 0.04)
    assert (plain.n_different, row.n_different) == (0, 1)


def test_there_is_a_row_for_each_category_and_method_and_for_all() -> None:
    runs = [
        run(method, category, 10, 1.0, category)
        for category in ("writing", "chat")
        for method in ("ar", "jacobi")
    ]
    assert [(row.category, row.method) for row in summarise(runs)] == [
        ("writing", "ar"),
        ("writing", "jacobi"),
        ("chat", "ar"),
        ("chat", "jacobi"),
        ("all", "ar"),
        ("all", "jacobi"),
    ]


# The tables

AR = Row(
    category="chat",
    method="ar",
    n_prompts=2,
    n_runs=2,
    n_different=0,
    tokens_per_second=210.06,
    speed_up_mean=1.0,
    speed_up_std=0.0,
    speed_up_overall=1.0,
    tokens_per_step=1.0,
    acceptance_rate=None,
    prefill_seconds=0.01234,
    phase_seconds={
        "draft": 1e-6,
        "build": 2e-6,
        "decode": 0.00456,
        "verify": 0.000123,
        "commit": 3e-6,
    },
    outside_decode_seconds=0.000129,
)
LOOKAHEAD = dataclasses.replace(
    AR,
    method="lookahead:window=7,guesses=7",
    tokens_per_second=1234.56,
    speed_up_mean=1.784,
    speed_up_std=0.231,
    speed_up_overall=1.7,
    tokens_per_step=2.345,
    acceptance_rate=0.1234,
    prefill_seconds=12.5,
    phase_seconds={**AR.phase_seconds, "decode": 0.0456},
    outside_decode_seconds=0.00061,
)


def test_a_category_is_a_table_of_methods() -> None:
    lines = tables([AR, LOOKAHEAD]).splitlines()
    assert lines[:5] == [
        "chat: 2 prompts",
        "method               tokens/s     speed-up overall tokens/step accept prefill"
        " draft build decode verify commit outside",
        "ar                      210.1  1.00 ± 0.00    1.00        1.00      –   12.34"
        " 0.001 0.002  4.560  0.123  0.003     129",
        "lookahead:window=7,guesses=7",
        "                       1234.6  1.78 ± 0.23    1.70        2.35  12.3%   12500"
        " 0.001 0.002  45.60  0.123  0.003     610",
    ]
    assert max(map(len, lines)) <= 120


def test_all_categories_get_a_table_of_their_own_only_if_there_are_several() -> None:
    everything = dataclasses.replace(AR, category="all", n_prompts=1, speed_up_std=None)
    writing = dataclasses.replace(AR, category="writing")
    assert [line for line in tables([AR, everything]).splitlines() if ": 2" in line] == [
        "chat: 2 prompts"
    ]
    several = tables([AR, writing, everything])
    assert [line for line in several.splitlines() if " prompt" in line and ":" in line][:3] == [
        "chat: 2 prompts",
        "writing: 2 prompts",
        "all categories: 1 prompt",
    ]
    assert "1.00 ± –" in several


def piece(token: int) -> bytes:
    return {7: b" the", 8: b" a", 9: b"\xff"}[token]


def test_identical_texts_are_one_line() -> None:
    runs = [run("ar", "p", 3, 1.0), run("jacobi", "p", 3, 1.0)]
    assert differences(runs, piece) == "every text identical to plain decoding (2 runs)"


def test_every_text_that_differs_is_listed_with_tokens_and_gap() -> None:
    runs = [
        run("ar", "p", 3, 1.0),
        run("jacobi", "p", 3, 1.0, first_difference=Difference(57, 7, 8, 0.00312345)),
        run("jacobi", "q", 3, 1.0, first_difference=Difference(2, None, 9, None)),
    ]
    assert differences(runs, piece).splitlines()[1:] == [
        "  jacobi  p  token 57: plain ' the', here ' a', logit gap 0.003123",
        "  jacobi  q  token 2: plain the end, here '\\\\xff', logit gap –",
    ]
    assert differences(runs, piece).startswith("2 of 3 runs differ from plain decoding")


def test_the_list_of_differences_stops_at_twenty_and_counts_the_rest() -> None:
    runs = [run("x", str(i), 3, 1.0, first_difference=Difference(0, 7, 8, 1.0)) for i in range(23)]
    lines = differences(runs, piece).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 3 more; --json keeps them all"


def test_skipped_turns_are_counted_and_named() -> None:
    assert skipped_turns([]) == ""
    assert skipped_turns([Skipped("a#2", "chat", "long")]) == (
        "1 prompt skipped, too long for the context: a#2"
    )
    assert skipped_turns([Skipped("a#2", "chat", "long"), Skipped("b", "chat", "long")]) == (
        "2 prompts skipped, too long for the context: a#2, b"
    )


# Flags and methods


def test_plain_decoding_comes_first_where_it_is_missing_and_nothing_comes_twice() -> None:
    def names(*texts: str) -> list[str]:
        return [str(method) for method in with_baseline([parse_method(text) for text in texts])]

    assert names("jacobi", "jacobi:guesses=8", "jacobi:guesses=4") == [
        "ar",
        "jacobi",
        "jacobi:guesses=4",
    ]
    assert names("jacobi", "ar") == ["jacobi", "ar"]


def test_the_order_of_methods_rotates_from_round_to_round() -> None:
    plan = Plan([parse_method(name) for name in ("ar", "jacobi", "lookahead")], SamplingParams(), 8)
    assert [[method.name for method in plan.rotated(n)] for n in range(4)] == [
        ["ar", "jacobi", "lookahead"],
        ["jacobi", "lookahead", "ar"],
        ["lookahead", "ar", "jacobi"],
        ["ar", "jacobi", "lookahead"],
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--methods", "lokahead"], "there is no method 'lokahead'; did you mean lookahead?"),
        (["--methods", "jacobi:guesses=0"], "guesses is 0; give 1 to 256"),
        (["--repeat", "0"], "'0' is not right; give a whole number from 1"),
        (["--n-predict", "many"], "'many' is not right; give a whole number from 1"),
        (["--prompt", "Hi", "--prompts", "p.jsonl"], "not allowed with argument"),
    ],
)
def test_a_wrong_flag_is_explained(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "no/such.gguf"], "error: 'no/such.gguf'"),
        (["--prompts", "no/such.jsonl"], "error: cannot read the prompts no/such.jsonl"),
        (["--categories", "poems"], "error: no prompt has the category 'poems'"),
        (["--json", "no/such/file.json"], "error: cannot write --json no/such/file.json"),
        (["--temperature", "-1"], "error: temperature is -1.0; give 0.0 to 100.0"),
    ],
)
def test_an_error_ends_with_one_line_and_code_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(reason)


def test_the_list_of_methods_explains_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list-methods"]) == 0
    shown = capsys.readouterr().out
    assert shown == list_methods() + "\n"
    for kind in METHODS.values():
        assert f"\n{kind.name}  " in "\n" + shown
        for name, text in parameter_docs(kind.params).items():
            assert text, f"{kind.params.__name__} does not say what {name} is"
            assert f"    {name}=" in shown


def test_parameter_docs_come_from_the_docstring_in_both_its_forms() -> None:
    @dataclasses.dataclass(frozen=True)
    class Params:
        """What they do.

        width   columns of
                the window
        ---
        guesses: tokens guessed (m).
        """

        width: int = 3
        guesses: int = 4
        silent: int = 5

    assert parameter_docs(Params) == {
        "width": "columns of the window",
        "guesses": "tokens guessed (m)",
        "silent": "",
    }


# The whole, on a tiny model

EXACT = ["--threads", "1", "--kv-type", "f32", "--flash-attn", "off"]
PROMPTS = (
    '{"question_id": "c1", "category": "cats", "turns": ["the cat saw a dog", "and a cat"]}\n'
    '{"question_id": "d1", "category": "dogs", "prompt": "a dog, a cat and the dog"}\n'
)


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS, encoding="utf-8")
    return str(path)


@pytest.fixture
def engine(tiny_model: Path) -> Any:
    params = ContextParams(n_threads=1, kv_type="f32", flash_attn="off")
    with Engine.load(tiny_model, params) as loaded:
        yield loaded


class Wrong:
    """A verifier that is not lossless: it takes the second best token at every step."""

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        return [0], int(np.argsort(output.logits(0))[-2])


@pytest.fixture
def wrong_method(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(
        METHODS, "wrong", MethodKind("wrong", "", NoParams, lambda *_: [], lambda *_: Wrong())
    )
    return "wrong"


def bench_json(path: Path, arguments: Sequence[str], code: int = 0) -> dict[str, Any]:
    """The JSON of a benchmark that ends with ``code``."""
    assert bench.main([*arguments, *EXACT, "--json", str(path)]) == code
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_the_json_holds_every_run_of_every_method(
    tiny_model: Path, prompt_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    document = bench_json(
        tmp_path / "out.json",
        [
            *("--model", str(tiny_model), "--prompts", prompt_file, "--n-predict", "12"),
            *("--repeat", "2", "--trace-batches", str(trace)),
            *("--methods", "prompt-lookup", "jacobi:guesses=4"),
        ],
    )
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
        assert one["same_as_ar"] is True
        assert one["first_difference"] is None
        assert one["method"] != "ar" or one["n_drafted"] == 0
    assert {row["category"] for row in document["summary"]} == {"cats", "dogs", "all"}
    assert len(document["summary"]) == 9

    shown = capsys.readouterr()
    assert "every text identical to plain decoding (18 runs)" in shown.out
    assert "\x1b" not in shown.out + shown.err
    assert "18/18" in shown.err
    rows = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > sum(one["n_steps"] for one in runs)
    assert all(len(row) == 4 for batch in rows for row in batch)


def test_a_text_that_differs_is_reported_with_its_gap(
    tiny_model: Path,
    prompt_file: str,
    tmp_path: Path,
    wrong_method: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(tiny_model), "--prompts", prompt_file, "--n-predict", "4"]
    document = bench_json(tmp_path / "out.json", [*arguments, "--methods", wrong_method])
    found = [run["first_difference"] for run in document["runs"] if run["method"] == "wrong"]
    assert [at["index"] for at in found] == [0, 0, 0]
    assert all(at["logit_gap"] > 0 and at["ar_token"] != at["token"] for at in found)
    assert [row["n_different"] for row in document["summary"]] == [0, 2, 0, 1, 0, 3]
    assert "3 of 6 runs differ from plain decoding" in capsys.readouterr().out


def test_the_plain_logits_are_those_that_plain_decoding_chose_from(engine: Engine) -> None:
    prompt = engine.model.tokenize("the cat saw a dog")
    tokens = engine.generate(prompt, method="ar", max_tokens=6).run().token_ids
    assert [
        int(plain_logits(engine, prompt, tokens[:n]).argmax()) for n in range(len(tokens))
    ] == tokens


def test_every_method_sees_plain_decodings_replies_before_a_later_turn(
    engine: Engine, wrong_method: str
) -> None:
    methods = [parse_method(name) for name in (wrong_method, "ar")]
    seen: dict[tuple[str, str], list[int]] = {}
    replies: dict[tuple[str, str], str] = {}

    def on_run(method: str, prompt_id: str, done: Any) -> None:
        seen[prompt_id, method] = done.prompt
        replies[prompt_id, method] = done.text

    plan = Plan(methods, SamplingParams(), 6)
    list(measure(engine, [Prompt("c", "cats", ("the cat", "a dog"))], plan, on_run))
    assert replies["c", "ar"] != replies["c", "wrong"]
    assert seen["c#2", "wrong"] == seen["c#2", "ar"]
    text = engine.model.detokenize(seen["c#2", "ar"]).decode()
    assert f"<|assistant|>{replies['c', 'ar']}<|end|>" in text


def test_raw_prompts_are_continued_as_they_are(engine: Engine) -> None:
    seen: list[list[int]] = []
    plan = Plan([parse_method("ar")], SamplingParams(), 3, raw=True)
    prompts = [Prompt("c", "cats", ("the cat",))]
    list(measure(engine, prompts, plan, lambda method, prompt_id, done: seen.append(done.prompt)))
    assert seen == [engine.model.tokenize("the cat")]


def test_every_run_prefills_its_whole_prompt(engine: Engine) -> None:
    reused: list[int] = []
    plan = Plan([parse_method("ar"), parse_method("jacobi")], SamplingParams(), 3, repeat=2)

    def on_run(method: str, prompt_id: str, done: Any) -> None:
        reused.append(done.stats.n_reused)

    list(measure(engine, [Prompt("c", "cats", ("the cat",))], plan, on_run))
    assert reused == [0, 0, 0, 0]


def test_turns_too_long_for_the_context_are_skipped_and_named(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    long = "cat " * 100
    path.write_text(
        f'{{"question_id": "a", "turns": ["the cat", "{long}", "a dog"]}}\n{{"prompt": "a cat"}}\n',
        encoding="utf-8",
    )
    arguments = ["--model", str(tiny_model), "--prompts", str(path), "--ctx", "256"]
    document = bench_json(
        tmp_path / "out.json", [*arguments, "--methods", "ar", "--n-predict", "40"]
    )
    assert [run["prompt_id"] for run in document["runs"]] == ["a", "line-2"]
    assert [turn["prompt_id"] for turn in document["skipped"]] == ["a#2", "a#3"]
    shown = capsys.readouterr()
    assert "2 prompts skipped, too long for the context: a#2, a#3" in shown.out
    assert "a#2 is skipped: " in shown.err
    assert "do not fit a context of 256; raise --ctx to " in shown.err


def test_a_context_too_small_for_every_prompt_is_an_error(
    tiny_model: Path, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_model), "--prompts", prompt_file, "--n-predict", "999"]
    assert bench.main([*arguments, *EXACT]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: none of the 2 prompts leaves room for 999 tokens in a context of 512; "
        "raise --ctx or lower --n-predict"
    )


def test_ctrl_c_shows_and_keeps_what_was_done(
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
    arguments = ["--model", str(tiny_model), "--prompts", prompt_file, "--n-predict", "3"]
    document = bench_json(
        tmp_path / "out.json", [*arguments, "--methods", "ar"], code=bench.INTERRUPTED
    )
    assert [run["prompt_id"] for run in document["runs"]] == ["c1", "c1#2"]
    assert document["complete"] is False
    assert "cats: 2 prompts" in capsys.readouterr().out
