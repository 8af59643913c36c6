"""The benchmark: statistics, tables and flags."""

from __future__ import annotations

import pytest

from speculation.bench import __main__ as bench
from speculation.bench.options import parse_options
from speculation.bench.report import differences, list_methods, skipped_turns, tables
from speculation.bench.results import Difference, Skipped, first_difference
from speculation.bench.run import Plan, with_baseline
from speculation.bench.summary import summarise
from speculation.methods import METHODS, parameter_docs, parse_method
from speculation.sampling import SamplingParams
from tests.speculation.bench.runs import run

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
def test_the_first_difference_is_where_tokens_or_finish_reasons_differ(
    ar_tokens: list[int], tokens: list[int], index: int | None
) -> None:
    assert first_difference(ar_tokens, tokens) == index


# Statistics


def test_a_speed_up_is_a_ratio_of_medians_averaged_over_prompts() -> None:
    # Medians of prompt p are 10 and 20 tokens/s, of prompt q 20 and 80.
    runs = [run("ar", "p", 10, seconds) for seconds in (1.0, 0.5, 2.0)]
    runs += [run("jacobi", "p", 10, seconds) for seconds in (0.5, 0.1, 5.0)]
    runs += [run("ar", "q", 10, 0.5), run("jacobi", "q", 20, 0.25)]
    row = summarise(runs)[1]
    assert (row.category, row.method, row.n_prompts, row.n_runs) == ("chat", "jacobi", 2, 4)
    assert row.speed_up_mean == 3.0  # of 2 and 4
    assert row.speed_up_std == pytest.approx(1.4142135623730951)
    assert row.tokens_per_second == pytest.approx(50 / 5.85)
    assert row.speed_up_overall == pytest.approx(50 / 5.85 / (40 / 4.0))
    row = summarise(runs[:1])[0]
    assert (row.speed_up_mean, row.speed_up_std) == (1.0, None)  # of a single prompt


def test_replies_of_one_step_have_no_speed() -> None:
    runs = [
        run("ar", "p", 10, 1.0),
        run("x", "p", 20, 1.0),
        run("ar", "q", 0, 0.0, n_steps=1),
        run("x", "q", 0, 0.0, n_steps=1),
    ]
    plain, row = summarise(runs)[:2]
    assert (row.n_prompts, row.speed_up_mean, row.speed_up_std) == (2, 2.0, None)
    assert (plain.tokens_per_second, row.tokens_per_second, row.speed_up_overall) == (10, 20, 2)
    alone = summarise(runs[2:])[1]
    assert (alone.tokens_per_second, alone.speed_up_mean, alone.speed_up_overall) == (0, 0, 0)


def test_rates_and_times_cover_all_steps_together() -> None:
    difference = Difference(3, 7, 8, 0.5)
    runs = [
        run("ar", "p", 10, 1.0),
        run("x", "p", 30, 1.0, n_drafted=40, n_accepted=20, prefill_seconds=0.1),
        run("ar", "q", 10, 1.0),
        run("x", "q", 10, 0.5, n_drafted=10, n_accepted=0, first_difference=difference),
    ]
    plain, row = summarise(runs)[:2]
    assert row.tokens_per_step == 42 / 22
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
        run(method, category, 10, 1.0, category=category)
        for category in ("writing", "chat")
        for method in ("ar", "jacobi")
    ]
    rows = [f"{row.category} {row.method}" for row in summarise(runs)]
    assert rows == [
        "writing ar",
        "writing jacobi",
        "chat ar",
        "chat jacobi",
        "all ar",
        "all jacobi",
    ]


# The tables


def test_each_category_has_a_table_of_methods() -> None:
    name = "lookahead:window=7,guesses=7"
    phases = {"draft": 1e-5, "build": 2e-5, "decode": 0.456, "verify": 0.00123, "commit": 3e-5}
    runs = [
        run("ar", "p", 10, 0.5, phase_seconds=phases, prefill_seconds=0.01234),
        run("ar", "q", 10, 0.5, phase_seconds=phases, prefill_seconds=0.01234),
        run(name, "p", 20, 0.5, n_drafted=50, prefill_seconds=12.5),
        run(name, "q", 30, 0.5, n_drafted=31, n_accepted=10, prefill_seconds=12.5),
    ]
    (table,) = tables(summarise(runs))
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


def test_there_is_a_table_of_all_categories_only_if_there_are_several() -> None:
    chat = [run("ar", "p", 10, 1.0), run("ar", "q", 10, 1.0)]
    assert [table.title for table in tables(summarise(chat))] == ["chat: 2 prompts"]
    several = tables(summarise([*chat, run("ar", "r", 10, 1.0, category="writing")]))
    assert [(table.title, bool(table.note)) for table in several] == [
        ("chat: 2 prompts", False),
        ("writing: 1 prompt", False),
        ("all categories: 3 prompts", True),
    ]
    assert several[1].rows[0][2] == "1.00 ± –"


def piece(token: int) -> bytes:
    return {7: b" the", 8: b" a", 9: b"\xff"}[token]


def test_the_first_texts_that_differ_are_listed_and_identical_ones_counted() -> None:
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
    for n, counted in ((1, "1 run"), (2, "2 runs")):
        same = f"every text identical to plain decoding ({counted})"
        assert differences(runs[:1] * n, piece) == same
    lines = differences([runs[1]] * 23, piece).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 3 more; --json saves them all"


def test_skipped_turns_are_counted_and_named() -> None:
    skipped = [Skipped("a#2", "chat", "long"), Skipped("b", "chat", "long")]
    assert [skipped_turns(skipped[:n]) for n in range(3)] == [
        "",
        "1 prompt skipped, too long for the context: a#2\n",
        "2 prompts skipped, too long for the context: a#2, b\n",
    ]


# Flags and methods


def test_plain_decoding_is_added_first_and_duplicates_are_dropped() -> None:
    for texts, expected in (
        ("jacobi jacobi:guesses=8 jacobi:guesses=4", "ar jacobi jacobi:guesses=4"),
        ("jacobi ar", "jacobi ar"),
    ):
        methods = with_baseline([parse_method(text) for text in texts.split()])
        assert " ".join(map(str, methods)) == expected


def test_the_order_of_methods_rotates_from_round_to_round() -> None:
    plan = Plan([parse_method(name) for name in ("ar", "jacobi", "lookahead")], SamplingParams(), 8)
    assert [" ".join(method.name for method in plan.rotated(n)) for n in range(4)] == [
        "ar jacobi lookahead",
        "jacobi lookahead ar",
        "lookahead ar jacobi",
        "ar jacobi lookahead",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--methods", "lokahead"], "there is no method 'lokahead'; give one of auto, ar, "),
        (["--methods", "jacobi:guesses=0"], "guesses is 0; give 1 to 256"),
        (["--repeat", "0"], "invalid value '0'; give an integer from 1"),
        (["--n-predict", "many"], "invalid value 'many'; give an integer from 1"),
        (["--prompt", "Hi", "--prompts", "p.jsonl"], "--prompt and --prompts are both given"),
    ],
)
def test_an_invalid_flag_is_explained(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "no/such.gguf"], "error: file not found: no/such.gguf"),
        (["--prompts", "no/such.jsonl"], "error: cannot read the prompts no/such.jsonl"),
        (["--categories", "poems"], "error: no prompt has the category 'poems'"),
        (["--json", "no/such/file.json"], "error: cannot write no/such/file.json: no such folder"),
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
    assert max(map(len, shown.splitlines())) <= 100
    assert "\nmtp  MTP:" in shown
    for kind in METHODS.values():
        assert f"\n{kind.name}  " in "\n" + shown
        for name, text in parameter_docs(kind.params).items():
            assert text, f"{kind.params.__name__} does not say what {name} is"
            assert f"    {name}=" in shown
