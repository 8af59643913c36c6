"""README and docs refer only to what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speculation.methods import BUILT_IN
from tests.support.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "models").glob("*.md")),
]
FOLDERS = ("app", "batching", "docs", "examples", "models", "speculation", "tests", "tools")


def text_outside_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line) for line in re.findall(r"^#+ (.*)$", text_outside_blocks(page), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_outside_blocks(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_backticks_exists(page: Path) -> None:
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text_outside_blocks(page)):
        if path.split("/")[0] in FOLDERS:
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("language", "module"), [("json", "json"), ("toml", "tomllib"), ("yaml", "yaml")]
)
def test_every_block_of_settings_can_be_read(language: str, module: str) -> None:
    parser = pytest.importorskip(module)  # Python 3.10 has no tomllib
    read = getattr(parser, "safe_load", None) or parser.loads
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", texts, re.M | re.S)
    assert blocks
    for block in blocks:
        read(block)


def test_the_readme_lists_every_method_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("\n## Methods\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.M) == [spec.name for spec in BUILT_IN]
