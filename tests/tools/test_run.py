"""``tools/run`` on stubbed machines, and the decisions and messages of ``tools/install.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import install
from tools.gpu_build import Choice

ROOT = Path(__file__).parents[2]
SH = shutil.which("sh")
TOOLS = ("dirname", "mktemp", "grep", "tail", "rm", "env", "mkdir", "cp", "chmod")

pytestmark = pytest.mark.skipif(SH is None or os.name == "nt", reason="tools/run is a sh script")

# A Python that has venv once apt-get has installed it. Its environments are copies of it.
PYTHON = """\
case "$*" in
  *"import ensurepip"*) [ -e "$STATE/venv" ] ;;
  *"import pip"*) [ -e "$STATE/env" ] ;;
  *"%d.%d-venv"*) echo python3.11-venv ;;
  *"-m venv"*) echo "venv" >> "$STATE/calls"; mkdir -p "$4/bin"; touch="$STATE/env"; : > "$touch"
    cp "$0" "$4/bin/python"; cp "$SPECULATION" "$4/bin/speculation" ;;
  *--check*) [ -e "$STATE/installed" ] ;;
  *install.py*) shift; echo "install.py $*" >> "$STATE/calls"; : > "$STATE/installed" ;;
  *--version*) echo "Python 3.11.2" ;;
esac
"""
APT_GET = """\
while [ "$1" != install ] && [ "$1" != update ]; do shift; done
[ "$1" = update ] && { echo "apt-get update" >> "$STATE/calls"; : > "$STATE/lists"; exit; }
[ -e "$STATE/lists" ] || { echo "E: Unable to locate package g++" >&2; exit 100; }
shift 3
echo "apt-get install $*" >> "$STATE/calls"
: > "$STATE/venv"
cp "$0" "$BIN/g++"
"""
SUDO = """\
[ "$1" = -n ] && exit "$SUDO_ALLOWED"
echo "sudo" >> "$STATE/calls"
exec "$@"
"""


class Machine:
    """A folder of programs as the whole PATH, and a checkout with only tools/."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.state, self.root = folder / "bin", folder / "state", folder / "checkout"
        for made in (self.bin, self.state, self.root / "tools"):
            made.mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "run", self.root / "tools")
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        self.add("python3", PYTHON)
        self.add("speculation", 'echo "speculation $*" >> "$STATE/calls"')

    def add(self, name: str, script: str) -> None:
        file = self.bin / name
        file.write_text(f"#!{SH}\n{script}")
        file.chmod(0o755)

    def run(self, *arguments: str, user: str = "0", **env: str) -> tuple[int, list[str], str]:
        """The exit status, the programs that were called, and what was written to stderr."""
        self.add("id", f"echo {user}")
        calls = self.state / "calls"
        calls.unlink(missing_ok=True)
        given = {"PATH": str(self.bin), "BIN": str(self.bin), "STATE": str(self.state)}
        given["SPECULATION"] = str(self.bin / "speculation")
        done = subprocess.run(
            [str(SH), str(self.root / "tools" / "run"), *arguments],
            env={**given, "SUDO_ALLOWED": "0", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        lines = calls.read_text().splitlines() if calls.exists() else []
        return done.returncode, lines, done.stderr


APT = "Installing python3.11-venv g++ with apt-get (a minute or two)\n"
VENV = "Creating .venv with Python 3.11.2\n"
MISSING = (
    "tools/run: install python3.11-venv g++ (Debian's names), then run this again; "
    "you are not root and may not use sudo\n"
)
INSTALLED = ["apt-get install python3.11-venv g++", "venv", "install.py --model"]
PROGRAMS = {"apt-get": APT_GET, "sudo": SUDO, "c++": ""}


@pytest.mark.parametrize(
    ("programs", "there", "user", "allowed", "calls", "told"),
    [  # what the machine has, who starts it, and whether sudo is allowed (0)
        ("apt-get", "", "0", "0", ["apt-get update", *INSTALLED], APT + VENV),
        ("apt-get sudo", "lists", "1000", "0", ["sudo", *INSTALLED], APT + VENV),
        ("apt-get", "", "1000", "1", [], MISSING),
        ("apt-get sudo", "", "1000", "1", [], MISSING),
        ("", "venv", "0", "0", ["venv", f"{INSTALLED[2]} --no-compiler there is no apt-get"], VENV),
        ("c++", "venv", "1000", "0", INSTALLED[1:], VENV),
    ],
)
def test_what_is_missing_is_installed_once_or_named(
    programs: str, there: str, user: str, allowed: str, calls: list[str], told: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    for name in programs.split():
        machine.add(name, PROGRAMS[name])
    for name in there.split():
        (machine.state / name).touch()
    done = machine.run("chat", "--model", "a b", user=user, SUDO_ALLOWED=allowed)
    assert done == (int(not calls), calls and [*calls, "speculation chat --model a b"], told)
    if calls:
        assert machine.run("bench", "--limit", "1", user=user)[1] == ["speculation bench --limit 1"]


def test_an_unusable_python_and_an_unknown_command_each_give_one_line(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("python2", "exit 1")
    unusable = "tools/run: PYTHON=python2 is not a Python from 3.10 to 3.14\n"
    assert machine.run("chat", PYTHON="python2") == (1, [], unusable)
    assert machine.run("dance")[2] == (
        "tools/run: give one of: chat, serve, bench, train, models, devices, rpc-worker, test\n"
    )


# tools/install.py


def missing(done: dict[str, object], wanted: dict[str, object]) -> list[str]:
    return [step for step, key in wanted.items() if done.get(step) != key]


CPU = Choice()
CUDA = Choice("an NVIDIA GPU (L4)", "CUDA", "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=89")
NO_TOOLKIT = Choice("an NVIDIA GPU (L4)", "CUDA", needs="the CUDA toolkit")


def steps(
    done: dict[str, object], extras: Sequence[str] = (), model: bool = False, cmake_args: str
    | None = None, gpu: Choice = CPU,
) -> dict[str, Any]:  # fmt: skip
    return install.wanted_steps(done, extras, model, cmake_args, lambda: gpu)


def test_only_what_changed_is_installed_again_or_what_came_later() -> None:
    first = steps({}, model=True)
    assert list(first) == ["llama", "project", "model"]
    assert missing(first, steps(first)) == []
    with_dev = steps(first, ["dev"])
    assert missing(first, with_dev) == ["project"]
    done = {**first, **with_dev}
    assert missing(done, steps(done, model=True)) == []
    # CMake's arguments are kept until they change, whatever the GPU.
    cuda = steps({}, cmake_args="-DGGML_CUDA=on")
    for given, expected in ((None, []), ("-DGGML_VULKAN=on", ["llama"]), ("", ["llama"])):
        assert missing(cuda, steps(cuda, cmake_args=given, gpu=CUDA)) == expected
    first = steps({}, gpu=NO_TOOLKIT)
    assert "gpu" not in first["llama"]
    compiled = steps(first, gpu=CUDA)
    assert missing(first, compiled) == ["llama"]
    assert compiled["llama"]["gpu"] == CUDA.flags
    # Neither a driver that fails today nor another nvcc compiles again.
    assert missing(compiled, steps(compiled, gpu=CPU)) == []
    without = steps(compiled, cmake_args="", gpu=CUDA)
    assert missing(compiled, without) == ["llama"]
    assert missing(without, steps(without, gpu=CUDA)) == []


WHEEL, GPU, CPU_BUILD = "wheel", "gpu", "cpu"  # what pip is asked for


@pytest.mark.parametrize(
    ("choice", "there", "asked", "gpu", "said"),
    [
        # there: what pip can install, and whether it has the GPU's backend and loads
        (CPU, {CPU_BUILD: ""}, [CPU_BUILD], None, ""),
        (CUDA, {WHEEL: "CUDA"}, [WHEEL], "wheel", ""),
        (NO_TOOLKIT, {WHEEL: "CUDA"}, [WHEEL], "wheel", ""),
        (CUDA, {GPU: "CUDA"}, [WHEEL, GPU], CUDA.flags, "with CUDA"),
        (CUDA, {WHEEL: "", GPU: "CUDA"}, [WHEEL, "gpu from source"], CUDA.flags, "with CUDA"),
        (NO_TOOLKIT, {WHEEL: "unloadable", CPU_BUILD: ""}, [WHEEL, "cpu from source"], None,
         "install the CUDA toolkit"),
        (CUDA, {GPU: "unloadable", CPU_BUILD: ""}, [WHEEL, GPU, CPU_BUILD], "", "cannot be loaded"),
        (CUDA, {CPU_BUILD: ""}, [WHEEL, GPU, CPU_BUILD], "", "nvcc failed"),
    ],
)  # fmt: skip
def test_a_wheel_for_the_gpu_comes_before_compiling_and_the_cpu_last(
    choice: Choice, there: dict[str, str], asked: list[str], gpu: str | None, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    commands: list[str] = []
    installed = [""]

    def pip(command: list[str], what: str, environment: dict[str, str]) -> None:
        kind = GPU if "GGML_CUDA" in environment["CMAKE_ARGS"] else CPU_BUILD
        if "--only-binary" in command:
            kind = WHEEL
        commands.append(kind + (" from source" if "--no-binary" in command else ""))
        if kind not in there:
            raise install.InstallFailed("nvcc failed")
        installed[0] = there[kind]

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install, "gpu_choice", lambda: choice)
    monkeypatch.setattr(install, "has_backend", lambda name: installed[0] == name)
    monkeypatch.setattr(install, "is_loadable", lambda: installed[0] != "unloadable")
    wanted = steps({}, gpu=choice)["llama"]
    found = install.install_llama(wanted, None, None)
    assert commands == asked
    assert found.get("gpu") == gpu
    last = capsys.readouterr().err.rpartition("tools/run: ")[2]
    assert said in last and bool(said) == bool(last)
    assert f"CMAKE_ARGS='{CUDA.flags}' sh tools/run" in last or gpu != ""
    # The next start finds nothing missing.
    assert steps({"llama": found}, gpu=choice)["llama"] == found


def test_the_users_flags_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        install, "pip", lambda command, what, env: seen.append((command, env["CMAKE_ARGS"]))
    )
    monkeypatch.setattr(install, "gpu_choice", lambda: CUDA)
    wanted = steps({}, cmake_args="-DGGML_HIP=on", gpu=CUDA)["llama"]
    assert install.install_llama(wanted, None, None) == wanted
    ((command, flags),) = seen
    assert "--no-binary" in command and flags.endswith(" -DGGML_HIP=on") and "CUDA" not in flags
    monkeypatch.delenv("SKBUILD_BUILD_TARGETS", raising=False)
    environment = install.build_environment("-DGGML_CUDA=on -DLLAVA_BUILD=ON")
    ours, _, users = environment["CMAKE_ARGS"].partition(" -DGGML_CUDA=on")
    assert ours.startswith("-DLLAVA_BUILD=OFF ") and ours.endswith("llama_build.cmake")
    assert (users, environment["SKBUILD_BUILD_TARGETS"]) == (" -DLLAVA_BUILD=ON", "llama;ggml")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert install.requirement(project).startswith("llama-cpp-python>=")


ERROR = "  ERROR: Could not find a version that satisfies the requirement x (from versions: none)"
RETRY = "  WARNING: Retrying after connection broken by 'NewConnectionError(Failed: [Errno -3])'"
FAILED = ["  FAILED: b.o", "  b.cpp:3: error: no such type"]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (["  [1/2] g++ a.cpp", *FAILED, *["  note"] * 30], FAILED),
        ([RETRY, ERROR, "  error: subprocess-exited-with-error"], [RETRY]),
        ([ERROR, "  error: subprocess-exited-with-error"], [ERROR]),
    ],
)
def test_the_first_failure_comes_before_pips_comments(log: list[str], reason: list[str]) -> None:
    assert install.failure(log)[:2] == [line.strip() for line in reason]


def test_a_failed_step_reports_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LOG", tmp_path / "log")
    command = ["install", "--no-index", "no-such-package"]
    with pytest.raises(install.InstallFailed, match=r"^Trying failed [\s\S]*no-such-package"):
        install.pip(command, "Trying")
    assert f"$ {sys.executable} -m pip {' '.join(command)}" in install.LOG.read_text()
