"""Today's coding agents, set up as docs/agents.md says, create a file and read one back.

They are programs of others, from npm and PyPI, so only ``-m agents`` runs these tests. ``PATH`` has
to have them. With a stand-in for the model, the first command of each agent's part runs, with the
GGUF in SPECULATION_AGENTS_MODEL the last one, for small models.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.agents.scripted import CONTENT, CREATE, READ, SECRET, Careful
from tests.support.fake_endpoint import served
from tests.support.paths import ROOT
from tools.compare import free_port

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
PROGRAMS = {
    "opencode": "opencode",
    "Codex": "codex",
    "Claude Code": "claude",
    "qwen-code": "qwen",
    "Continue": "cn",
    "Cline": "cline",
    "pi": "pi",
    "aider": "aider",
}
MODEL = os.environ.get("SPECULATION_AGENTS_MODEL", "")
SECONDS = 3600.0  # for two cores and an agent's long prompt

pytestmark = [pytest.mark.agents, pytest.mark.skipif(os.name == "nt", reason="needs sh")]


@dataclass(frozen=True)
class Part:
    """An agent's part of the page: the files to write in the home folder, and the commands."""

    files: dict[str, str]
    commands: list[str]

    @classmethod
    def of(cls, agent: str, address: str) -> Part:
        text = PAGE.split(f"\n## {agent}\n")[1].split("\n## ")[0]
        text = text.replace("http://127.0.0.1:8080", address.rstrip("/"))
        files = re.findall(r"`~/([^`\n]+)`[^`]*\n\n```\w+\n(.*?)^```$", text, re.M | re.S)
        return cls(dict(files), re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S))


@pytest.fixture(scope="module")
def careful() -> str:
    return served(Careful())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not Path(MODEL).is_file():
        pytest.skip("SPECULATION_AGENTS_MODEL names no GGUF, such as Qwen2.5-Coder 1.5B")
    log = tmp_path_factory.mktemp("server") / "log"
    address = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "app.cli", "serve", "--model", MODEL]
    command += ["--sampling", "temperature=0", "--port", address.rpartition(":")[2]]
    with log.open("w") as output, subprocess.Popen(command, cwd=ROOT, stderr=output) as server:
        try:
            while not _is_ready(address):
                assert server.poll() is None, log.read_text()
                time.sleep(0.2)
            yield address
        finally:
            server.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urlopen(f"{address}/health"):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("agent", PROGRAMS)
def test_each_agent_works_as_the_page_says(agent: str, careful: str, tmp_path: Path) -> None:
    part = Part.of(agent, careful)
    check(agent, part, part.commands[0], tmp_path)


@pytest.mark.parametrize("agent", PROGRAMS)
def test_each_agent_works_with_a_small_model(agent: str, real: str, tmp_path: Path) -> None:
    part = Part.of(agent, real)
    before, start = _tokens(real), time.monotonic()
    check(agent, part, part.commands[-1], tmp_path)
    read, cached = (after - old for after, old in zip(_tokens(real), before, strict=True))
    took = time.monotonic() - start
    print(f"{agent}: {read} prompt tokens read, {cached} from the cache, {took:.0f} s")


def _tokens(address: str) -> tuple[int, int]:
    """The prompt tokens that were read so far, and those from the cache."""
    with urlopen(f"{address}/metrics") as answer:
        figures = dict(re.findall(r"^([\w:]+) (\S+)$", answer.read().decode(), re.M))
    names = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"
    read, cached = (int(float(figures[name])) for name in names)
    return read, cached


def check(agent: str, part: Part, command: str, folder: Path) -> None:
    """Have the agent create a file and read one back."""
    if shutil.which(PROGRAMS[agent]) is None:
        pytest.skip(f"{PROGRAMS[agent]} is not installed")
    home, project = folder / "home", folder / "project"
    project.mkdir()
    (project / "secret.txt").write_text(f"{SECRET}\n")
    for name, text in part.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    assert CREATE in command
    answer = _run(command, home, project)
    assert (project / "note.txt").read_text().strip() == CONTENT, answer
    reading = command.replace(CREATE, READ).replace("note.txt", "secret.txt")
    assert SECRET in _run(reading, home, project)


def _run(command: str, home: Path, project: Path) -> str:
    """What the agent writes. Nothing of the user's own settings reaches it."""
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=project,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        text=True,
    )
    return done.stdout
