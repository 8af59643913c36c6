"""The benchmark's HTML report, and the tables of a method's choices."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from speculation.bench import __main__ as bench
from speculation.bench.html_report import command_line, write_report
from speculation.bench.plots import PALETTE, colours
from speculation.bench.report import bucketed, choices
from speculation.bench.results import Run
from speculation.bench.suites import SUITES
from speculation.bench.summary import summarise
from speculation.bench.table import Table
from speculation.methods import BUILT_IN
from tests.speculation.bench import runs
from tests.speculation.bench.runs import results


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


def test_the_choices_of_a_method_are_shown_by_category_and_source() -> None:
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


def test_choices_are_shown_of_methods_with_several_sources_even_if_nothing_was_accepted() -> None:
    assert choices(summarise([run("ar", "chat-1", 1.0), run("jacobi", "chat-1", 1.0)])) == []
    (table,) = choices(summarise([run("ar", "chat-1", 1.0), run("auto", "chat-1", 1.0)]))
    assert list(table.headings)[-1] == "65+"
    assert table.note.endswith("no draft was accepted")


# Tables


def test_a_table_is_aligned_and_in_html_escaped() -> None:
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
    html = Table("a<b", ["x&y"], [["<script>"]]).html()
    for escaped in (
        *("<caption>a&lt;b</caption>", "<th scope=col>x&amp;y</th>"),
        "<th scope=row>&lt;script&gt;</th>",
    ):
        assert escaped in html


# The report


def test_the_command_line_shows_files_without_their_folders() -> None:
    flags = ["--model", "/home/me/a b.gguf", "--json=results/o.json", "--prompt", "a/b"]
    flags += ["--methods", "auto", "/home/me/own.py:spec", "--limit", "2"]
    assert command_line(flags) == (
        "python -m speculation.bench --model 'a b.gguf' --json=o.json --prompt a/b "
        "--methods auto own.py:spec --limit 2"
    )


def test_a_method_keeps_its_colour_and_a_few_methods_never_share_one() -> None:
    few = colours(["ar", "jacobi", "lookahead", "lookahead:window=7", "lookahead:window=5"])
    assert len(set(few.values())) == 5
    assert few["jacobi"] == colours(["jacobi", "ar"])["jacobi"]
    assert few["ar"] not in PALETTE
    names = [spec.name for spec in BUILT_IN]
    assert len(set(colours(names).values())) == len(names)


def test_the_page_is_complete_and_loads_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    jacobi = [("chat-1", 0.5, {}), ("chat-2", 0.25, {}), ("code-1", 0.5, {"guess": 4})]
    measured = results(
        *(run("ar", prompt_id, 1.0) for prompt_id, *_ in jacobi),
        *(run("jacobi:guesses=4", i, s, accepted_by_source=of) for i, s, of in jacobi),
    )
    shown: Any = {"differences": "every <text> identical", "notes": ["a note"]}
    shown["command"] = "python -m speculation.bench"
    page = write_report(tmp_path / "report", SUITES["builtin"], measured, **shown)
    text = page.read_text(encoding="utf-8")
    for wanted in (
        "M &lt;7B&gt;: comparison of methods",
        "2026-01-31 12:30 UTC",
        "<b>2.40×</b><span>jacobi:guesses=4,<wbr> 1.67 tokens per step</span>",  # 10/1.25 over 10/3
        "<td>3.00 ± 1.41</td>",
        "rows and draft sources of jacobi:guesses=4",
        "every &lt;text&gt; identical",
        "a note",
        "cpu: C",
        "<pre>python -m speculation.bench</pre>",
    ):
        assert wanted in text
    assert not re.search(r"<script|<link|@import|url\(|https?://", text)
    assert re.findall(r'src="([^;]+;[^,]+),', text) == ["data:image/svg+xml;base64"] * 3
    figures = sorted(path.name for path in page.parent.glob("*.svg"))
    assert figures == ["phases.svg", "speed-up.svg", "tokens-per-step.svg"]
    for name in figures:
        root = ElementTree.parse(page.parent / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not list(root.iter("{http://www.w3.org/2000/svg}text"))  # text is drawn as outlines


def test_a_report_of_plain_decoding_alone_can_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = results(run("ar", "chat-1", 1.0), complete=False)
    page = write_report(tmp_path, SUITES["builtin"], measured, differences="", notes=[], command="")
    assert "unfinished" in page.read_text(encoding="utf-8")


def test_a_report_without_matplotlib_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("speculation.bench.plots.find_spec", lambda name: None)
    assert bench.main(["--model", "no/such.gguf", "--report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --report needs matplotlib, which is not installed; "
        "run pip install matplotlib, or leave --report out"
    )


def test_a_report_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    if util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    assert bench.main(["--model", "no/such.gguf", "--report", str(tmp_path / "file")]) == 2
    assert "it is a file; give a folder" in capsys.readouterr().err


def test_a_measured_report_names_no_folder(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = [
        *("--model", str(tiny_model), "--prompt", "the cat", "--n-predict", "5", "--threads", "1"),
        *("--flash-attn", "off", "--methods", "jacobi", "--json", str(tmp_path / "out.json")),
    ]
    assert bench.main([*flags, "--report", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "jacobi" in page
    assert str(tmp_path) not in page


def test_measuring_does_not_import_matplotlib() -> None:
    code = "import sys, speculation.bench.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
