"""The suites of the benchmark: what they measure, how they evaluate it, and their pictures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from speculation.bench import __main__ as bench
from speculation.bench.options import parse_options
from speculation.bench.plot import write_plot
from speculation.bench.results import Curve, Results
from speculation.bench.suites import SUITES, cost, scaling
from speculation.engine import Engine
from speculation.methods import parse_method
from tests.speculation.bench.runs import results, run


def measured(*of_methods: tuple[str, int]) -> Results:
    """Runs of ten steps by method and number of tokens, in one second after the first."""
    ten: dict[str, Any] = {"n_steps": 10, "n_drafted": 30, "rows_histogram": {4: 10}}
    ten["tokens_histogram"] = {1: 10}
    runs = [
        run(method, "p", n - 1, (n - 1) / n, n_accepted=n - 10, **ten) for method, n in of_methods
    ]
    return results(*runs)


def test_flags_override_the_defaults_of_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert [method.name for method in parse_options([]).methods] == ["ar", "auto", "prompt-lookup"]
    for flags, n_predict, limit, prompts in (
        ("", 128, None, "builtin"),
        ("--suite memory --limit 1", 256, 1, "memory"),
        ("--suite memory --n-predict 9 --prompts novel", 9, None, "novel"),
        ("--suite scaling", 128, 1, "builtin"),
        ("--suite scaling --limit 3", 128, 3, "builtin"),
    ):
        options = parse_options(flags.split())
        assert (options.n_predict, options.limit, options.prompts) == (n_predict, limit, prompts)
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    shown = capsys.readouterr().out
    for suite in SUITES.values():
        assert f"  {suite.name:8} {suite.title}\n" in shown


def test_the_suite_memory_measures_its_own_prompts_cold_and_then_warm(engine: Engine) -> None:
    options = parse_options(["--suite", "memory", "--limit", "1"])
    prompts = SUITES["memory"].prompts(options.read_prompts(), engine, options.plan())
    kinds = ("same-file", "agent-loop", "ask-again")
    assert [prompt.category for prompt in prompts] == [
        f"{kind}, {state}" for state in ("cold", "warm") for kind in kinds
    ]
    assert prompts[0].turns == prompts[3].turns


# scaling


def test_the_grid_doubles_the_window_up_to_the_batch_size() -> None:
    grid = [parse_method(text).params for text in scaling.grid()]
    assert [p.window for p in grid if p.ngram == 3] == [1, 2, 4, 8, 16, 32, 64]
    assert [p.window for p in grid if p.ngram == 7] == [1, 2, 4, 8, 16, 32]
    assert [p.guesses for p in grid if (p.window, p.ngram) == (16, 5)] == [16, 1, 2, 4, 8, 32, 64]
    assert max((p.window + p.guesses) * (p.ngram - 1) for p in grid) == 512


@pytest.mark.parametrize(
    ("points", "fit"),
    [  # by the logarithm of the window: base, slope and R²
        ([(1, 1.5), (2, 1.75), (4, 2.0), (8, 2.25)], (1.5, 0.25, 1.0)),
        ([(1, 1.0), (2, 2.0), (4, 2.0)], (7 / 6, 0.5, 0.75)),
        ([(1, 1.5), (2, 1.75)], None),
        ([(1, 1.5), (2, 1.502), (4, 1.5), (8, 1.501)], (1.5006, 0.0001, None)),  # all the same
    ],
)
def test_a_line_is_fitted(points: list[tuple[int, float]], fit: tuple[Any, ...] | None) -> None:
    found = scaling.fitted(points)
    got = None if found is None else (found.base, found.slope, found.r2)
    assert got == (fit if fit is None else pytest.approx(fit, abs=1e-4))


CONSTANT = (
    ("ar", 10),
    *((f"lookahead:window={w},ngram={n},guesses={w}", 12) for n in (3, 5) for w in (1, 2, 4)),
)


def test_scaling_fits_only_the_runs_with_as_many_guesses_as_columns() -> None:
    rows, fits = SUITES["scaling"].tables(
        measured(
            ("ar", 10),
            *(
                (f"lookahead:window={window},ngram=5,guesses={guesses}", n)
                for window, guesses, n in ((1, 1, 12), (2, 2, 15), (16, 2, 40), (4, 4, 18))
            ),
        )
    )
    assert [" ".join(row) for row in rows.rows] == [
        "1 5 1 4.0 1.200 6.7% 1.200",
        "2 5 2 4.0 1.500 16.7% 1.500",
        "4 5 4 4.0 1.800 26.7% 1.800",
        "16 5 2 4.0 4.000 100.0% 4.000",
    ]
    assert [" ".join(row) for row in fits.rows] == ["5 1.200 0.300 1.000"]
    law = "b: gain per doubling of the window; R² near 1: the scaling law holds"
    assert fits.note == law
    _, fits = SUITES["scaling"].tables(measured(*CONSTANT))
    assert [" ".join(row) for row in fits.rows] == ["3 1.200 0.000 –", "5 1.200 0.000 –"]
    assert fits.note.startswith(f"{law}\nR² –: tokens per step are the same for every W")


def test_cost_curves_are_measured_and_saved(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
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


@pytest.mark.parametrize(
    ("name", "is_missing", "reason"),
    [
        ("a.svg", True, "--plot needs matplotlib, .*pip install matplotlib, or leave --plot out"),
        ("picture", False, "give a name that ends with .svg, .png or .pdf"),
        ("none/picture.svg", False, "no such folder; give a file in a folder that exists"),
    ],
)
def test_a_picture_that_cannot_be_made_is_refused_before_measuring(
    name: str, is_missing: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if is_missing:
        monkeypatch.setattr("speculation.bench.plot.find_spec", lambda name: None)
    else:
        pytest.importorskip("matplotlib")
    assert bench.main(["--model", "no/such.gguf", "--plot", str(tmp_path / name)]) == 2
    assert re.search(reason, capsys.readouterr().err)


def test_measuring_imports_matplotlib_only_for_a_picture(tiny_model: Path, tmp_path: Path) -> None:
    code = "import sys, speculation.bench.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    flags = [
        *("--model", str(tiny_model), "--prompt", "the cat", "--n-predict", "5", "--threads", "1"),
        *("--flash-attn", "off", "--methods", "jacobi", "--plot", str(picture)),
    ]
    assert bench.main(flags) == 0
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def drawn(name: str, measured: Results, folder: Path) -> Any:
    """The suite's picture, laid out."""
    figure = pytest.importorskip("matplotlib.figure")
    made: list[Any] = []
    savefig = figure.Figure.savefig

    def kept(drawn: Any, file: str) -> None:
        made.append(drawn)
        savefig(drawn, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure.Figure, "savefig", kept)
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
def test_no_tick_labels_overlap_whatever_the_times(scale: float, tmp_path: Path) -> None:
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
        assert [overlapping(ax) for ax in drawn(name, found, tmp_path).axes] == [[]]


def test_constant_data_show_all_points_and_no_trend(tmp_path: Path) -> None:
    drawn("builtin", results(run("ar", "chat-1", 9, 1.0)), tmp_path)
    figure = drawn("scaling", measured(*CONSTANT), tmp_path)
    points = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"][:2]
    assert [list(line.get_ydata()) for line in points] == [[1.2, 1.2, 1.2]] * 2
    looks = [(line.get_fillstyle(), line.get_marker()) for line in points]
    assert looks == [("none", "o"), ("none", "s")]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["N = 3: 1.20 for every W", "N = 5: 1.20 for every W", "N = 7"]
    low, high = figure.axes[0].get_ylim()
    assert high - low > 0.5
