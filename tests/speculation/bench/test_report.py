"""The benchmark's picture, and the tables of a method's choices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from speculation.bench import __main__ as bench
from speculation.bench.report import Table, bucketed, choices
from speculation.bench.results import Run
from speculation.bench.summary import summarise
from tests.speculation.bench import runs


def run(method: str, prompt_id: str, seconds: float, **more: Any) -> Run:
    """A run of six steps and ten tokens, in the category that its id begins with."""
    stats: dict[str, Any] = {
        "n_steps": 6,
        "n_drafted": 14,
        "n_accepted": 4,
        "rows_histogram": {1: 3, 4: 2, 9: 1},
        "tokens_histogram": {1: 4, 3: 2},
    }
    category = prompt_id.split("-")[0]
    return runs.run(method, prompt_id, 9, seconds, category=category, **{**stats, **more})


# Choices


def test_rows_are_counted_in_buckets_that_end_at_powers_of_two() -> None:
    histogram = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 8: 6, 9: 7, 16: 8, 17: 9, 64: 10, 65: 11, 500: 12}
    assert bucketed(histogram) == [1, 2, 7, 11, 15, 9, 10, 23]


def test_the_choices_of_a_method_are_shown_by_category_and_source_if_it_has_several() -> None:
    plain = [run("ar", f"{category}-1", 1.0) for category in ("chat", "code", "talk")]
    both, lookup = {"lookup": 3, "recycling": 1}, {"lookup": 4}
    measured = [
        *plain,
        run("auto", "chat-1", 1.0, accepted_by_source=both),
        run("auto", "code-1", 1.0, rows_histogram={2: 6}, accepted_by_source=lookup),
        run("auto", "talk-1", 1.0, rows_histogram={1: 6}),
    ]
    (table,) = choices(summarise(measured))
    assert table.title == "rows and draft sources of auto"
    shown = [" | ".join(row) for row in (table.headings, *table.rows)]
    assert shown == [
        "steps with rows: | 1 | 2 | 3–4 | 5–8 | 9–16 | 17–32 | 33–64 | 65+ | accepted from: "
        "| lookup | recycling",
        "chat | 50% | 0% | 33% | 0% | 17% | 0% | 0% | 0% |  | 75% | 25%",
        "code | 0% | 100% | 0% | 0% | 0% | 0% | 0% | 0% |  | 100% | 0%",
        "talk | 100% | 0% | 0% | 0% | 0% | 0% | 0% | 0% |  | – | –",
        "all categories | 50% | 33% | 11% | 0% | 6% | 0% | 0% | 0% |  | 88% | 12%",
    ]
    assert choices(summarise([run("ar", "chat-1", 1.0), run("jacobi", "chat-1", 1.0)])) == []
    (table,) = choices(summarise([run("ar", "chat-1", 1.0), run("auto", "chat-1", 1.0)]))
    assert list(table.headings)[-1] == "65+"
    assert table.note.endswith("no draft was accepted")


# Tables


def test_a_table_is_aligned() -> None:
    rows = [["a", "1"], ["bcdef", "23"], ["a-name-of-25-characters--", "456"]]
    assert Table("rules", ["name", "n"], rows, "a note").text().splitlines() == [
        "rules",
        "name     n",
        "a        1",
        "bcdef   23",
        "a-name-of-25-characters--",
        "       456",
        "a note",
    ]


# The picture


def test_a_picture_without_matplotlib_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("speculation.bench.plot.find_spec", lambda name: None)
    assert bench.main(["--model", "no/such.gguf", "--plot", str(tmp_path / "a.svg")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --plot needs matplotlib, which is not installed; "
        "run pip install matplotlib, or leave --plot out"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("picture", "give a name that ends with .svg, .png or .pdf"),
        ("none/picture.svg", "no such folder; give a file in a folder that exists"),
    ],
)
def test_a_picture_needs_a_file_of_a_known_kind(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert bench.main(["--model", "no/such.gguf", "--plot", str(tmp_path / name)]) == 2
    assert reason in capsys.readouterr().err


def test_a_measured_benchmark_draws_its_picture(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    flags = [
        *("--model", str(tiny_model), "--prompt", "the cat", "--n-predict", "5", "--threads", "1"),
        *("--flash-attn", "off", "--methods", "jacobi", "--plot", str(picture)),
    ]
    assert bench.main(flags) == 0
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_measuring_does_not_import_matplotlib() -> None:
    code = "import sys, speculation.bench.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
