"""The suites of the benchmark: what they measure, and how they evaluate it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculation.auto.calibration import measure_cost
from speculation.bench import __main__ as bench
from speculation.bench.options import parse_options
from speculation.bench.results import Curve, Results, Run
from speculation.bench.suites import SUITES, cost, scaling
from speculation.bench.suites.context import length_name
from speculation.engine import Engine
from speculation.methods import parse_method
from tests.support.tiny_gguf import write_tiny_gguf

PHASES = {"draft": 0.01, "build": 0.02, "decode": 0.4, "verify": 0.03, "commit": 0.04}


def results(*runs: tuple[str, int, float], curves: tuple[Curve, ...] = ()) -> Results:
    """Runs of ten steps by method, number of tokens and seconds, on one prompt."""
    return Results(
        model={"file": "m.gguf", "description": "llama 7B"},
        device={"devices": ["cpu: C"], "threads": 2},
        settings={},
        started="2026-01-31T12:30:00+00:00",
        runs=[
            Run(
                method=str(parse_method(method)),
                prompt_id="p",
                category="chat",
                repeat=0,
                n_prompt=5,
                tokens=list(range(n_tokens)),
                n_first=1,
                n_steps=10,
                n_rows=40,
                n_drafted=30,
                n_accepted=n_tokens - 10,
                prefill_seconds=0.25,
                decode_seconds=seconds
                * (n_tokens - 1)
                / n_tokens,  # so that tokens per second are n_tokens / seconds
                phase_seconds=PHASES,
                finish_reason="length",
                rows_histogram={4: 10},
                tokens_histogram={1: 10},
            )
            for method, n_tokens, seconds in runs
        ],
        curves=list(curves),
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--suite", "scaling", "--methods", "ar"], "--suite scaling has its own methods"),
        (["--suite", "context", "--limit", "1"], "--suite context has its own limit"),
        (["--suite", "cost", "--prompt", "Hi"], "--suite cost has its own prompt"),
        (["--suite", "cost", "--repeat", "3"], "--suite cost generates nothing; leave --repeat"),
        (["--suite", "cost", "--n-predict", "5"], "leave --n-predict out"),
        (["--suite", "cost", "--temperature", "1"], "leave --temperature out"),
        (["--suite", "cots"], "invalid choice: 'cots'"),
    ],
)
def test_a_flag_that_a_suite_sets_itself_is_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert reason in capsys.readouterr().err


def test_flags_override_the_defaults_of_a_suite() -> None:
    assert parse_options([]).n_predict == 128
    assert parse_options(["--suite", "context"]).n_predict == 64
    assert parse_options(["--suite", "context"]).raw is True
    assert parse_options(["--suite", "scaling"]).limit == 1
    assert parse_options(["--suite", "scaling", "--limit", "3"]).limit == 3


def test_the_help_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    shown = capsys.readouterr().out
    for suite in SUITES.values():
        assert f"  {suite.name:8} {suite.title}\n" in shown


# memory


def test_the_suite_memory_measures_its_own_prompts_cold_and_then_warm(engine: Engine) -> None:
    options = parse_options(["--suite", "memory", "--limit", "1"])
    assert (options.prompts, options.n_predict) == ("memory", 256)
    prompts = SUITES["memory"].prompts(options.read_prompts(), engine, options.plan())
    assert [prompt.category for prompt in prompts] == [
        "same-file, cold",
        "agent-loop, cold",
        "ask-again, cold",
        "same-file, warm",
        "agent-loop, warm",
        "ask-again, warm",
    ]
    assert prompts[0].turns == prompts[3].turns
    assert parse_options(["--suite", "memory", "--prompts", "builtin"]).prompts == "builtin"


# scaling


def test_the_grid_doubles_the_window_up_to_the_batch_size() -> None:
    grid = [parse_method(text).params for text in scaling.grid()]
    assert [p.window for p in grid if p.ngram == 3] == [1, 2, 4, 8, 16, 32, 64]
    assert [p.window for p in grid if p.ngram == 7] == [1, 2, 4, 8, 16, 32]
    assert [p.guesses for p in grid if (p.window, p.ngram) == (16, 5)] == [16, 1, 2, 4, 8, 32, 64]
    assert max((p.window + p.guesses) * (p.ngram - 1) for p in grid) == 512


def test_a_line_is_fitted_over_the_logarithm_of_the_window() -> None:
    fit = scaling.fitted([(1, 1.5), (2, 1.75), (4, 2.0), (8, 2.25)])
    assert fit is not None
    assert (fit.base, fit.slope, fit.r2) == pytest.approx((1.5, 0.25, 1.0))
    bent = scaling.fitted([(1, 1.0), (2, 2.0), (4, 2.0)])
    assert bent is not None
    assert bent.r2 == pytest.approx(0.75)
    assert scaling.fitted([(1, 1.5), (2, 1.75)]) is None


def test_scaling_fits_only_the_runs_with_as_many_guesses_as_columns() -> None:
    measured = results(
        ("ar", 10, 1.0),
        ("lookahead:window=1,ngram=5,guesses=1", 12, 1.0),
        ("lookahead:window=2,ngram=5,guesses=2", 15, 1.0),
        ("lookahead:window=16,ngram=5,guesses=2", 40, 1.0),
        ("lookahead:window=4,ngram=5,guesses=4", 18, 1.0),
    )
    rows, fits = SUITES["scaling"].tables(measured)
    assert [list(row) for row in rows.rows] == [
        ["1", "5", "1", "4.0", "1.200", "6.7%", "1.200"],
        ["2", "5", "2", "4.0", "1.500", "16.7%", "1.500"],
        ["4", "5", "4", "4.0", "1.800", "26.7%", "1.800"],
        ["16", "5", "2", "4.0", "4.000", "100.0%", "4.000"],
    ]
    assert [list(row) for row in fits.rows] == [["5", "1.200", "0.300", "1.000"]]


# cost


@pytest.mark.parametrize(
    ("fixed", "row", "beyond", "bend"),
    [(0.010, 0.0001, 0.001, 16), (0.001, 0.003, 0.0005, 4), (0.005, 0.001, 0.001, 64)],
)
def test_a_roof_of_two_lines_is_fitted(fixed: float, row: float, beyond: float, bend: int) -> None:
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    seconds = [fixed + row * min(n, bend) + beyond * max(0, n - bend) for n in sizes]
    fit = cost.fit_two_lines(Curve(0, sizes, seconds))
    assert fit is not None
    assert (fit.fixed, fit.row, fit.row_beyond) == pytest.approx((fixed, row, beyond))
    assert fit.bend == bend
    assert fit.error == pytest.approx(0.0, abs=1e-9)


def test_cost_curves_are_measured_saved_and_resumed(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out.json"
    flags = ["--suite", "cost", "--model", str(tiny_model), "--threads", "1", "--json", str(path)]
    monkeypatch.setattr(cost, "N_PAST", (0, 100, 200))
    asked: list[int] = []

    def broken_off(context: Any, **more: Any) -> Any:
        asked.append(more["n_past"])
        if len(asked) == 4:  # the warm-up, 0, 100
            raise KeyboardInterrupt
        return measure_cost(context, **more)

    monkeypatch.setattr(cost, "measure_cost", broken_off)
    assert bench.main(flags) == bench.INTERRUPTED
    assert asked == [0, 0, 100, 200]
    assert bench.main([*flags, "--resume"]) == 0
    assert asked == [0, 0, 100, 200, 0, 200]
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [curve["n_past"] for curve in document["curves"]] == [0, 100, 200]
    assert document["curves"][0]["sizes"] == list(cost.SIZES)
    assert document["complete"] is True
    assert "rows  n_past 0  n_past 100  n_past 200" in capsys.readouterr().out


# context


def test_texts_of_growing_length_fill_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "out.json", write_tiny_gguf(tmp_path / "long.gguf", n_ctx=2100)
    flags = ["--suite", "context", "--model", str(model), "--threads", "1", "--ctx", "2100"]
    assert bench.main([*flags, "--n-predict", "4", "--json", str(path)]) == 0
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert [(run["category"], run["method"]) for run in runs] == [
        ("1k", "ar"),
        ("1k", "prompt-lookup"),
        ("2k", "ar"),
        ("2k", "prompt-lookup"),
    ]
    assert [1010 < run["n_prompt"] <= 1020 for run in runs[:2]] == [True, True]
    assert [2030 < run["n_prompt"] <= 2044 for run in runs[2:]] == [True, True]
    shown = capsys.readouterr().out
    assert "longer texts are left out; give --ctx 32768 for all" in shown


def test_lengths_are_named_in_k() -> None:
    assert [length_name(n) for n in (1024, 32768, 500)] == ["1k", "32k", "500"]


# Figures


@pytest.mark.parametrize("name", ["scaling", "cost", "context"])
def test_every_suite_draws_its_figure(name: str) -> None:
    pytest.importorskip("matplotlib")
    from speculation.bench.plots import style, svg

    measured = {
        "scaling": results(
            ("ar", 10, 1.0),
            ("lookahead:window=1,ngram=5,guesses=1", 12, 1.0),
            ("lookahead:window=2,ngram=5,guesses=2", 15, 1.0),
            ("lookahead:window=4,ngram=5,guesses=4", 15, 1.0),
        ),
        "cost": results(curves=(Curve(0, [1, 2, 4, 8, 16], [1.0, 1.1, 1.3, 1.7, 2.5]),)),
        "context": results(("ar", 10, 1.0), ("prompt-lookup", 20, 1.0)),
    }[name]
    with style():
        ((file_name, caption, figure),) = SUITES[name].figures(measured)
        assert svg(figure).startswith("<?xml")
    assert file_name == name
    assert caption.endswith(".")
    assert all(ax.get_xlabel() for ax in figure.axes)
