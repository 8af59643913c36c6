"""The suites of the benchmark: what they measure, and how they evaluate it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from speculation.bench import __main__ as bench
from speculation.bench.options import parse_options
from speculation.bench.plot import write_plot
from speculation.bench.results import Curve, Results
from speculation.bench.suites import SUITES, cost, scaling
from speculation.engine import Engine
from speculation.methods import parse_method
from tests.speculation.bench.runs import results, run


def measured(*of_methods: tuple[str, int], **more: Any) -> Results:
    """Runs of ten steps by method and number of tokens, in one second after the first."""
    ten: dict[str, Any] = {
        "n_steps": 10,
        "n_drafted": 30,
        "rows_histogram": {4: 10},
        "tokens_histogram": {1: 10},
    }
    runs = [
        run(method, "p", n - 1, (n - 1) / n, n_accepted=n - 10, **ten) for method, n in of_methods
    ]
    return results(*runs, **more)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--suite", "scaling", "--methods", "ar"], "scaling does not use --methods; leave it"),
        *(
            (["--suite", "cost", f"--{flag}", "1"], f"cost does not use --{flag}; leave it out")
            for flag in ("limit", "prompt", "repeat", "n-predict", "temperature")
        ),
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
    assert [method.name for method in parse_options([]).methods] == ["ar", "auto", "prompt-lookup"]
    assert parse_options([]).n_predict == 128
    assert parse_options(["--suite", "memory"]).n_predict == 256
    assert parse_options(["--suite", "memory", "--n-predict", "9"]).n_predict == 9
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
    kinds = ("same-file", "agent-loop", "ask-again")
    assert [prompt.category for prompt in prompts] == [
        f"{kind}, {state}" for state in ("cold", "warm") for kind in kinds
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
    rows, fits = SUITES["scaling"].tables(
        measured(
            ("ar", 10),
            ("lookahead:window=1,ngram=5,guesses=1", 12),
            ("lookahead:window=2,ngram=5,guesses=2", 15),
            ("lookahead:window=16,ngram=5,guesses=2", 40),
            ("lookahead:window=4,ngram=5,guesses=4", 18),
        )
    )
    assert [list(row) for row in rows.rows] == [
        ["1", "5", "1", "4.0", "1.200", "6.7%", "1.200"],
        ["2", "5", "2", "4.0", "1.500", "16.7%", "1.500"],
        ["4", "5", "4", "4.0", "1.800", "26.7%", "1.800"],
        ["16", "5", "2", "4.0", "4.000", "100.0%", "4.000"],
    ]
    assert [list(row) for row in fits.rows] == [["5", "1.200", "0.300", "1.000"]]
    assert fits.note == "b: gain per doubling of the window; R² near 1: the scaling law holds"


CONSTANT = (
    ("ar", 10),
    *((f"lookahead:window={w},ngram={n},guesses={w}", 12) for n in (3, 5) for w in (1, 2, 4)),
)


def test_the_same_tokens_per_step_for_every_window_say_nothing_about_the_law() -> None:
    fit = scaling.fitted([(1, 1.5), (2, 1.502), (4, 1.5), (8, 1.501)])
    assert fit is not None
    assert fit.r2 is None
    _, fits = SUITES["scaling"].tables(measured(*CONSTANT))
    assert [list(row) for row in fits.rows] == [
        ["3", "1.200", "0.000", "–"],
        ["5", "1.200", "0.000", "–"],
    ]
    assert fits.note.splitlines()[1] == (
        "R² –: tokens per step are the same for every W, which says nothing about the law"
    )


# cost


def test_cost_curves_are_measured_and_saved(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out.json"
    flags = ["--suite", "cost", "--model", str(tiny_model), "--threads", "1", "--json", str(path)]
    monkeypatch.setattr(cost, "N_PAST", (0, 100, 9999))
    assert bench.main(flags) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [curve["n_past"] for curve in document["curves"]] == [0, 100]
    assert document["curves"][0]["sizes"] == list(cost.SIZES)
    assert document["complete"] is True
    shown = capsys.readouterr().out
    assert "rows  n_past 0  n_past 100" in shown
    assert "the context or the batch is too small for n_past 9999" in shown


# Pictures


def drawn(name: str, measured: Results, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The suite's picture, laid out."""
    figure = pytest.importorskip("matplotlib.figure")
    made: list[Any] = []
    savefig = figure.Figure.savefig

    def kept(drawn: Any, file: str) -> None:
        made.append(drawn)
        savefig(drawn, file)

    monkeypatch.setattr(figure.Figure, "savefig", kept)
    write_plot(str(folder / f"{name}.svg"), name, measured)
    assert (folder / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
    (ax,) = made[0].axes
    assert ax.get_xlabel()
    return made[0]


def overlapping(ax: Any) -> list[tuple[str, str]]:
    """Neighbouring tick labels of an axis that overlap in its figure."""
    found = []
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        labels = [tick.label1 for tick in ticks if tick.label1.get_visible()]
        for one, other in pairwise(label for label in labels if label.get_text()):
            if one.get_window_extent().overlaps(other.get_window_extent()):
                found.append((one.get_text(), other.get_text()))
    return found


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_no_tick_labels_overlap_whatever_the_times(
    scale: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    methods = ["ar", "auto", "prompt-lookup", "lookahead:window=7,ngram=5,guesses=7", "jacobi"]
    runs = [
        run(name, f"{category}-{i}", 99, scale / i, category=category)
        for name in methods
        for category in ("chat", "edit-code", "summarise")
        for i in (1, 2)
    ]
    sizes = [1, 2, 3, 4, 8, 16, 32, 64]
    curves = [Curve(n, sizes, [scale * (1 + n / 4096 + r / 8) for r in sizes]) for n in (0, 8192)]
    for name, found in (("builtin", results(*runs)), ("cost", results(curves=curves))):
        figure = drawn(name, found, monkeypatch, tmp_path)
        assert [overlapping(ax) for ax in figure.axes] == [[]]
        monkeypatch.undo()


def test_constant_data_show_all_points_and_no_trend_and_plain_decoding_can_be_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn("builtin", results(run("ar", "chat-1", 9, 1.0)), monkeypatch, tmp_path)
    monkeypatch.undo()
    figure = drawn("scaling", measured(*CONSTANT), monkeypatch, tmp_path)
    points = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"][:2]
    assert [list(line.get_ydata()) for line in points] == [[1.2, 1.2, 1.2]] * 2
    assert [line.get_fillstyle() for line in points] == ["none", "none"]
    assert [line.get_marker() for line in points] == ["o", "s"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["N = 3: 1.20 for every W", "N = 5: 1.20 for every W", "N = 7"]
    low, high = figure.axes[0].get_ylim()
    assert high - low > 0.5
