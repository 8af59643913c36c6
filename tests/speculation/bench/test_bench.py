"""The benchmark: prompts, statistics, tables, differing texts and flags."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter
from speculation.bench import __main__ as bench
from speculation.bench.options import parse_options
from speculation.bench.prompt_file import (
    Prompt,
    PromptFileError,
    parse_prompts,
    read_prompts,
    select_prompts,
)
from speculation.bench.report import (
    Table,
    bucketed,
    choices,
    differences,
    list_methods,
    skipped_turns,
    tables,
)
from speculation.bench.results import Difference, Run, Skipped, first_difference
from speculation.bench.run import Plan, with_baseline
from speculation.bench.summary import summarise
from speculation.methods import METHODS, parameter_docs, parse_method
from speculation.sampling import SamplingParams
from tests.speculation.bench.runs import run


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
def test_the_first_difference_is_where_tokens_or_finish_reasons_differ(
    ar_tokens: list[int], tokens: list[int], index: int | None
) -> None:
    assert first_difference(ar_tokens, tokens) == index


# Medians of prompt p are 10 and 20 tokens/s, of prompt q 20 and 80.
REPEATED = [
    *(run("ar", "p", 10, seconds) for seconds in (1.0, 0.5, 2.0)),
    *(run("jacobi", "p", 10, seconds) for seconds in (0.5, 0.1, 5.0)),
    *(run("ar", "q", 10, 0.5), run("jacobi", "q", 20, 0.25)),
]
ONE_STEP = [run(name, "q", 0, 0.0, n_steps=1) for name in ("ar", "x")]
AND_ONE_STEP = [run("ar", "p", 10, 1.0), run("x", "p", 20, 1.0), *ONE_STEP]
DIFFERENCE = Difference(3, 7, 8, 0.5)
DRAFTED = [
    run("ar", "p", 10, 1.0),
    run("x", "p", 30, 1.0, n_drafted=40, n_accepted=20, prefill_seconds=0.1),
    run("ar", "q", 10, 1.0),
    run("x", "q", 10, 0.5, n_drafted=10, n_accepted=0, first_difference=DIFFERENCE),
]


@pytest.mark.parametrize(
    ("runs", "row", "expected"),
    [
        (REPEATED, 1, {"method": "jacobi", "n_prompts": 2, "n_runs": 4}),
        (REPEATED, 1, {"speed_up_mean": 3.0, "speed_up_std": 1.4142135623730951}),  # of 2 and 4
        (REPEATED, 1, {"tokens_per_second": 50 / 5.85, "speed_up_overall": 50 / 5.85 / 10}),
        (REPEATED[:1], 0, {"speed_up_mean": 1.0, "speed_up_std": None}),  # of a single prompt
        (AND_ONE_STEP, 0, {"tokens_per_second": 10}),
        (AND_ONE_STEP, 1, {"n_prompts": 2, "speed_up_mean": 2.0, "speed_up_std": None}),
        (AND_ONE_STEP, 1, {"tokens_per_second": 20, "speed_up_overall": 2}),
        (ONE_STEP, 1, {"tokens_per_second": 0, "speed_up_mean": 0, "speed_up_overall": 0}),
        (DRAFTED, 0, {"acceptance_rate": None, "n_different": 0}),
        (DRAFTED, 1, {"acceptance_rate": 0.4, "n_different": 1, "tokens_per_step": 42 / 22}),
        (DRAFTED, 1, {"prefill_seconds": 0.175, "outside_decode_seconds": 1.5 / 20 - 0.04}),
    ],
)
def test_rates_are_of_all_steps_and_speed_ups_ratios_of_medians_averaged_over_prompts(
    runs: list[Run], row: int, expected: dict[str, Any]
) -> None:
    found = summarise(runs)[row]
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)
    if runs is DRAFTED:
        phases = {"draft": 1, "build": 2, "decode": 40, "verify": 3, "commit": 4}
        assert {name: 1e3 * n for name, n in found.phase_seconds.items()} == pytest.approx(phases)


def test_each_category_has_a_table_of_methods_and_all_of_them_if_there_are_several() -> None:
    name = "lookahead:window=7,guesses=7"
    phases = {"draft": 1e-5, "build": 2e-5, "decode": 0.456, "verify": 0.00123, "commit": 3e-5}
    chat = [
        run("ar", "p", 10, 0.5, phase_seconds=phases, prefill_seconds=0.01234),
        run("ar", "q", 10, 0.5, phase_seconds=phases, prefill_seconds=0.01234),
        run(name, "p", 20, 0.5, n_drafted=50, prefill_seconds=12.5),
        run(name, "q", 30, 0.5, n_drafted=31, n_accepted=10, prefill_seconds=12.5),
    ]
    (table,) = tables(summarise(chat))
    lines = table.text().splitlines()
    assert lines[:5] == [
        "chat: 2 prompts",
        "method tokens/s    speed-up overall tokens/step accept prefill"
        " draft build decode verify commit outside",
        "ar         20.0 1.00 ± 0.00    1.00        1.00      –   12.34"
        " 0.001 0.002  45.60  0.123  0.003    4400",
        name,
        "           50.0 2.50 ± 0.71    2.50        2.36  12.3%   12500"
        " 1.000 2.000  40.00  3.000  4.000   10000",
    ]
    assert lines[5].startswith("speed-up: mean")
    assert max(map(len, lines)) <= 120
    several = tables(summarise([run("ar", "r", 10, 1.0, category="writing"), *chat]))
    assert [(each.title, [row[0] for row in each.rows], bool(each.note)) for each in several] == [
        ("writing: 1 prompt", ["ar"], False),
        ("chat: 2 prompts", ["ar", name], False),
        ("all categories: 3 prompts", ["ar", name], True),
    ]
    assert several[0].rows[0][2] == "1.00 ± –"


def test_the_choices_of_a_method_are_shown_by_category_and_source_if_it_has_several() -> None:
    histogram = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 8: 6, 9: 7, 16: 8, 17: 9, 64: 10, 65: 11, 500: 12}
    assert bucketed(histogram) == [1, 2, 7, 11, 15, 9, 10, 23]
    rows: dict[str, Any] = {"n_steps": 6, "rows_histogram": {1: 3, 4: 2, 9: 1}}
    both, lookup = {"lookup": 3, "recycling": 1}, {"lookup": 4}
    plain = [run("ar", "1", 9, 1.0, category=category) for category in ("chat", "code", "talk")]
    measured = [
        *plain,
        run("auto", "1", 9, 1.0, category="chat", **rows, accepted_by_source=both),
        run("auto", "1", 9, 1.0, category="code", rows_histogram={2: 6}, accepted_by_source=lookup),
        run("auto", "1", 9, 1.0, category="talk", rows_histogram={1: 6}),
    ]
    (table,) = choices(summarise(measured))
    assert table.title == "rows and draft sources of auto"
    assert [" | ".join(row) for row in (table.headings, *table.rows)] == [
        "steps with rows: | 1 | 2 | 3–4 | 5–8 | 9–16 | 17–32 | 33–64 | 65+ | accepted from: "
        "| lookup | recycling",
        "chat | 50% | 0% | 33% | 0% | 17% | 0% | 0% | 0% |  | 75% | 25%",
        "code | 0% | 100% | 0% | 0% | 0% | 0% | 0% | 0% |  | 100% | 0%",
        "talk | 100% | 0% | 0% | 0% | 0% | 0% | 0% | 0% |  | – | –",
        "all categories | 50% | 33% | 11% | 0% | 6% | 0% | 0% | 0% |  | 88% | 12%",
    ]
    assert choices(summarise([plain[0], run("jacobi", "1", 9, 1.0)])) == []
    (table,) = choices(summarise([plain[0], run("auto", "1", 9, 1.0)]))
    assert list(table.headings)[-1] == "65+"
    assert table.note.endswith("no draft was accepted")


def test_a_table_is_aligned() -> None:
    rows = [["a", "1"], ["bcdef", "23"], ["a-name-of-25-characters--", "456"]]
    assert Table("rules", ["name", "n"], rows, "a note").text() == (
        "rules\nname     n\na        1\nbcdef   23\na-name-of-25-characters--\n       456\na note"
    )


def piece(token: int) -> bytes:
    return {7: b" the", 8: b" a", 9: b"\xff"}[token]


def test_the_first_texts_that_differ_and_skipped_turns_are_listed_and_counted() -> None:
    runs = [
        run("ar", "p", 3, 1.0),
        run("jacobi", "p", 3, 1.0, first_difference=Difference(57, 7, 8, 0.00312345)),
        run("jacobi", "q", 3, 1.0, first_difference=Difference(2, None, 9, None)),
    ]
    first, *lines = differences(runs, piece).splitlines()
    assert first.startswith("2 of 3 runs differ from plain decoding")
    assert lines == [
        "  jacobi  p  token 57: plain ' the', here ' a', logit gap 0.003123",
        "  jacobi  q  token 2: plain the end, here '\\\\xff', logit gap –",
    ]
    for n, counted in ((1, "1 run"), (2, "2 runs")):
        same = f"every text identical to plain decoding ({counted})"
        assert differences(runs[:1] * n, piece) == same
    lines = differences([runs[1]] * 23, piece).splitlines()
    assert (len(lines), lines[-1]) == (22, "  and 3 more; --json saves them all")
    skipped = [Skipped("a#2", "chat", "long"), Skipped("b", "chat", "long")]
    assert [skipped_turns(skipped[:n]) for n in range(3)] == [
        "",
        "1 prompt skipped, too long for the context: a#2\n",
        "2 prompts skipped, too long for the context: a#2, b\n",
    ]


def test_plain_decoding_comes_first_duplicates_are_dropped_and_the_order_rotates() -> None:
    for texts, expected in (
        ("jacobi jacobi:guesses=8 jacobi:guesses=4", "ar jacobi jacobi:guesses=4"),
        ("jacobi ar", "jacobi ar"),
    ):
        methods = with_baseline([parse_method(text) for text in texts.split()])
        assert " ".join(map(str, methods)) == expected
    plan = Plan([parse_method(name) for name in ("ar", "jacobi", "suffix")], SamplingParams(), 8)
    orders = [" ".join(method.name for method in plan.rotated(n)) for n in range(4)]
    assert orders == ["ar jacobi suffix", "jacobi suffix ar", "suffix ar jacobi", orders[0]]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--methods lokahead", "there is no method 'lokahead'; give one of auto, ar, "),
        ("--methods jacobi:guesses=0", "guesses is 0; give 1 to 256"),
        ("--repeat 0", "invalid value '0'; give an integer from 1"),
        ("--n-predict many", "invalid value 'many'; give an integer from 1"),
        ("--prompt Hi --prompts p.jsonl", "--prompt and --prompts are both given"),
        ("--suite scaling --methods ar", "scaling does not use --methods; leave it"),
        *((f"--suite cost --{flag} 1", f"cost does not use --{flag}; leave it out")
         for flag in ("limit", "prompt", "repeat", "n-predict", "temperature")),
        ("--suite cots", "invalid choice: 'cots'"),
    ],
)  # fmt: skip
def test_an_invalid_flag_is_explained(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments.split())
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--model no/such.gguf", "file not found: no/such.gguf"),
        ("--prompts no/such.jsonl", "cannot read the prompts no/such.jsonl"),
        ("--categories poems", "no prompt has the category 'poems'"),
        ("--json no/such/file.json", "cannot write no/such/file.json: no such folder"),
        ("--temperature -1", "temperature is -1.0; give 0.0 to 100.0"),
    ],
)
def test_an_error_ends_with_one_line_and_code_2(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {reason}")


def test_the_list_of_methods_explains_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list-methods"]) == 0
    shown = capsys.readouterr().out
    assert shown == list_methods() + "\n"
    assert max(map(len, shown.splitlines())) <= 100
    assert "\nmtp  MTP:" in shown
    for kind in METHODS.values():
        assert f"\n{kind.name}  " in "\n" + shown
        for name, text in parameter_docs(kind.params).items():
            assert text, f"{kind.params.__name__} does not say what {name} is"
            assert f"    {name}=" in shown


def test_a_line_is_a_prompt_or_a_conversation() -> None:
    text = (
        '{"prompt": "Hi", "category": "a", "question_id": "one"}\n'
        '{"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "more": 1}\n'
        '\n{"prompt": "Hi"}\r\n'
    )
    prompts = parse_prompts(text, "p.jsonl")
    assert prompts == [
        Prompt("one", "a", ("Hi",)),
        Prompt("81", "writing", ("Write.", "Shorter.")),
        Prompt("line-4", "prompts", ("Hi",)),
    ]
    assert [prompts[1].turn_id(1), prompts[1].turn_id(2)] == ["81", "81#2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{prompt: 1}", "JSON is malformed"),
        ("[" * 5000, "got `array`; write one object per line"),
        ('{"prompt": "Hi", "more": ' + "[" * 5000, "recursion"),
        ('{"text": "Hi"}', 'neither "prompt" nor "turns"'),
        ('{"turns": []}', "Expected `array` of length >= 1 - at `$.turns`"),
        ('{"turns": "Hi"}', "got `str` - at `$.turns`"),
        ('{"turns": ["Hi", 3]}', "got `int` - at `$.turns[1]`"),
        ('{"prompt": ""}', "Expected `str` of length >= 1 - at `$.prompt`"),
        ('{"prompt": "\\ud800xaaaaaaaa"}', "surrogate"),
        ('{"prompt": "Hi", "category": 3}', "got `int` - at `$.category`"),
        ('{"prompt": "Hi", "category": "all"}', 'category name "all" is reserved; choose another'),
        ('{"prompt": "Hi", "question_id": true}', "got `bool` - at `$.question_id`"),
        ('{"prompt": "Hi", "question_id": "x"}', "line 1 has the question_id 'x' too"),
        ('{"prompt": "Hi", "question_id": "x#2"}', "line 1 has the question_id 'x#2' too"),
    ],
)
def test_an_invalid_line_is_reported_with_its_file(line: str, reason: str) -> None:
    text = f'{{"turns": ["Hi", "Ho"], "question_id": "x"}}\n{line}\n'
    with pytest.raises(PromptFileError) as caught:
        parse_prompts(text, "folder/p.jsonl")
    assert str(caught.value).startswith("folder/p.jsonl, line 2: ")
    assert reason in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"cannot read the prompts .*none\.jsonl"):
        read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(PromptFileError, match=r"p\.jsonl has no prompts"):
        parse_prompts("\n", "p.jsonl")


BUILTIN = "summarise context-qa edit-code chat extraction writing rewriting arithmetic"
NOVEL = "dialogue definition poem numbers languages random short-answer long-answer"


@pytest.mark.parametrize(
    ("name", "n", "categories"), [("builtin", 10, BUILTIN), ("novel", 4, NOVEL)]
)
def test_there_are_as_many_prompts_in_each_category(name: str, n: int, categories: str) -> None:
    counts = Counter(prompt.category for prompt in read_prompts(name))
    assert counts == dict.fromkeys(categories.split(), n)


def test_the_limit_applies_to_each_category_and_an_unknown_one_is_named() -> None:
    prompts = [Prompt(name, name[0], ("x", "y")) for name in ("a1", "b1", "a2", "b2", "a3", "c1")]
    for categories, limit, expected in (
        (None, 2, "a1 b1 a2 b2 c1"),
        (["a", "c"], 1, "a1 c1"),
        (["b"], None, "b1 b2"),
    ):
        assert " ".join(p.id for p in select_prompts(prompts, categories, limit)) == expected
    with pytest.raises(InvalidParameter, match="'chta'; categories: a, b, c"):
        select_prompts(prompts, ["chta"], None)
