"""The command ``speculation`` and its subcommand ``models``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import cli, models
from speculation.registry import ModelEntry

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("chat", "app.__main__"),
        ("bench", "speculation.bench.__main__"),
        ("train", "speculation.train.__main__"),
        ("models", "app.models"),
    ],
)
def test_a_command_runs_its_program_with_the_flags_after_it(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run(flags: list[str]) -> int:
        seen.append(flags)
        return 0

    monkeypatch.setattr(f"{module}.main", run)
    assert cli.main([command, "--model", "m.gguf", "--help"]) == 0
    assert seen == [["--model", "m.gguf", "--help"]]


def test_no_command_shows_the_usage_and_an_unknown_one_lists_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 0
    assert "usage: speculation COMMAND" in capsys.readouterr().out
    assert cli.main(["talk"]) == 2
    assert capsys.readouterr().err == (
        "speculation: unknown command 'talk'; `speculation --help` lists them\n"
    )


def test_the_list_of_models_says_which_are_downloaded_and_which_is_the_default(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here.gguf"
    here.touch()
    entries = [
        ModelEntry("first", here, None, "1 GB, MIT"),
        ModelEntry("second", here, None, "2 GB"),
        ModelEntry("elsewhere", tmp_path / "no.gguf", None, "3 GB"),
    ]
    assert models.table(entries, "first").splitlines() == [
        "first      default  1 GB, MIT",
        "second     here     2 GB",
        "elsewhere           3 GB",
    ]


def test_models_prints_the_file_of_a_name_and_one_line_for_an_unknown_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert models.main(["bundled"]) == 0
    assert capsys.readouterr().out == f"{ROOT / 'models' / 'speculation-14m-q8_0.gguf'}\n"
    assert models.main(["bundeld"]) == 2
    assert capsys.readouterr().err.startswith("error: file not found: bundeld. Did you mean 'bun")


def test_the_bench_starts_without_gradio() -> None:
    code = (
        "import sys, app.cli; app.cli.main(['bench', '--list-methods']);"
        "assert 'gradio' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
