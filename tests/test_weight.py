"""The product does not grow: each package has at most as many lines as its cap.

A cap may only fall. Whoever adds lines to a full package removes as many there. When lines have
gone, lower the cap to the number that ``python -m tests.test_weight`` prints.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Lines of Python, JavaScript, CSS, HTML and shell, with blank lines and docstrings.
CAPS = {
    "app": 1142,
    "app/api": 3935,
    "app/mcp": 575,
    "app/page": 4791,
    "app/page/static": 3031,
    "app/store": 1478,
    "app/worker": 2321,
    "batching": 1928,
    "batching/gguf": 802,
    "batching/llama": 3765,
    "speculation": 5084,
    "speculation/auto + drafting": 2867,
    "speculation/chat": 2400,
    "speculation/methods + heads": 3021,
    "speculation/bench, registry, train, …": 5855,
    "tools": 2612,
}
TOGETHER = {
    "speculation/auto": "speculation/auto + drafting",
    "speculation/drafting": "speculation/auto + drafting",
    "speculation/methods": "speculation/methods + heads",
    "speculation/heads": "speculation/methods + heads",
}
VENDORED = ("morphdom.js",)
KINDS = (".py", ".js", ".css", ".html", "")  # files of tools without a suffix are shell scripts


def package_of(path: Path) -> str:
    """The name in ``CAPS`` of the package to which a file counts."""
    folders = path.relative_to(ROOT).parent.parts
    if path.suffix in (".js", ".css", ".html"):
        return "app/page/static"
    name = "/".join(folders[:2])
    if folders[0] == "tools":
        return "tools"
    if len(folders) > 1 and folders[0] == "speculation" and name not in CAPS:
        return TOGETHER.get(name, "speculation/bench, registry, train, …")
    return name


@cache
def lines() -> Counter[str]:
    """The lines of each package."""
    counted: Counter[str] = Counter()
    for top in ("app", "batching", "speculation", "tools"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in KINDS and path.is_file() and path.name not in VENDORED:
                counted[package_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return counted


def test_every_package_has_a_cap() -> None:
    assert lines().keys() == CAPS.keys()


@pytest.mark.parametrize("package", CAPS)
def test_a_package_stays_below_its_cap(package: str) -> None:
    n, cap = lines()[package], CAPS[package]
    assert n <= cap, f"{package} has {n} lines, {n - cap} more than its cap; remove as many"


if __name__ == "__main__":
    for package, cap in CAPS.items():
        print(f'    "{package}": {min(cap, lines()[package])},')
