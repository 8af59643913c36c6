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


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


INSTALLED = ["apt-get install python3.11-venv g++", "venv", "install.py --model"]


def test_root_without_sudo_installs_what_is_missing_once(machine: Machine) -> None:
    machine.add("apt-get", APT_GET)
    code, calls, errors = machine.run("chat", "--model", "a b")
    assert (code, errors) == (
        0,
        "Installing python3.11-venv g++ with apt-get (a minute or two)\n"
        "Creating .venv with Python 3.11.2\n",
    )
    assert calls == ["apt-get update", *INSTALLED, "speculation chat --model a b"]
    assert machine.run("bench", "--limit", "1")[1] == ["speculation bench --limit 1"]


def test_a_user_installs_with_sudo_and_does_not_fetch_existing_package_lists(
    machine: Machine,
) -> None:
    machine.add("apt-get", APT_GET)
    machine.add("sudo", SUDO)
    (machine.state / "lists").touch()
    code, calls, _ = machine.run("models", user="1000")
    assert (code, calls) == (0, ["sudo", *INSTALLED, "speculation models"])


@pytest.mark.parametrize("sudo", [True, False])
def test_a_user_who_may_not_install_gets_one_line_naming_what_is_missing(
    machine: Machine, sudo: bool
) -> None:
    machine.add("apt-get", APT_GET)
    if sudo:
        machine.add("sudo", SUDO)
    code, calls, errors = machine.run("chat", user="1000", SUDO_ALLOWED="1")
    assert (code, calls) == (1, [])
    assert errors == (
        "tools/run: install python3.11-venv g++ (Debian's names), then run this again; "
        "you are not root and may not use sudo\n"
    )


def test_nothing_is_installed_as_root_and_a_wheel_is_tried_without_a_compiler(
    machine: Machine,
) -> None:
    (machine.state / "venv").touch()
    _, calls, _ = machine.run("chat")
    assert calls[1] == "install.py --model --no-compiler there is no apt-get"
    for made in ("env", "installed"):
        (machine.state / made).unlink()
    machine.add("c++", "")
    assert machine.run("chat", user="1000") == (
        0,
        ["venv", "install.py --model", "speculation chat"],
        "Creating .venv with Python 3.11.2\n",
    )


def test_an_unusable_python_and_an_unknown_command_each_give_one_line(machine: Machine) -> None:
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
    done: dict[str, object],
    extras: Sequence[str] = (),
    model: bool = False,
    cmake_args: str | None = None,
    gpu: Choice = CPU,
) -> dict[str, Any]:
    return install.wanted_steps(done, extras, model, cmake_args, lambda: gpu)


def test_only_what_changed_is_installed_again() -> None:
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


def test_a_toolkit_that_came_later_is_used_unless_the_user_wants_the_cpu() -> None:
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
        (
            CUDA,
            {GPU: "CUDA"},
            [WHEEL, GPU],
            CUDA.flags,
            "compiling llama.cpp for an NVIDIA GPU (L4), with CUDA",
        ),
        (
            CUDA,
            {WHEEL: "", GPU: "CUDA"},
            [WHEEL, "gpu from source"],
            CUDA.flags,
            "compiling llama.cpp for an NVIDIA GPU (L4), with CUDA",
        ),
        (
            NO_TOOLKIT,
            {WHEEL: "unloadable", CPU_BUILD: ""},
            [WHEEL, "cpu from source"],
            None,
            "this machine has an NVIDIA GPU (L4); to use it, install the CUDA toolkit and run "
            "this again. Going on with the CPU",
        ),
        (
            CUDA,
            {GPU: "unloadable", CPU_BUILD: ""},
            [WHEEL, GPU, CPU_BUILD],
            "",
            "warning: going on with the CPU. To try again: CMAKE_ARGS='-DGGML_CUDA=on "
            "-DCMAKE_CUDA_ARCHITECTURES=89' sh tools/run chat. Reason: the compiled library cannot "
            "be loaded",
        ),
        (
            CUDA,
            {CPU_BUILD: ""},
            [WHEEL, GPU, CPU_BUILD],
            "",
            "warning: going on with the CPU. To try again: CMAKE_ARGS='-DGGML_CUDA=on "
            "-DCMAKE_CUDA_ARCHITECTURES=89' sh tools/run chat. Reason: nvcc failed",
        ),
    ],
)
def test_a_wheel_for_the_gpu_comes_before_compiling_and_the_cpu_last(
    choice: Choice,
    there: dict[str, str],
    asked: list[str],
    gpu: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    last = capsys.readouterr().err.splitlines()[-1:]
    assert last == ([f"tools/run: {said}"] if said else [])
    # The next start finds nothing missing.
    assert steps({"llama": found}, gpu=choice)["llama"] == found


def test_the_users_flags_override_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        install, "pip", lambda command, what, env: seen.append((command, env["CMAKE_ARGS"]))
    )
    monkeypatch.setattr(install, "gpu_choice", lambda: CUDA)
    wanted = steps({}, cmake_args="-DGGML_HIP=on", gpu=CUDA)["llama"]
    assert install.install_llama(wanted, None, None) == wanted
    ((command, flags),) = seen
    assert "--no-binary" in command and flags.endswith(" -DGGML_HIP=on") and "CUDA" not in flags


def test_the_users_cmake_flags_come_after_ours_and_the_version_from_pyproject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SKBUILD_BUILD_TARGETS", raising=False)
    environment = install.build_environment("-DGGML_CUDA=on -DLLAVA_BUILD=ON")
    ours, _, users = environment["CMAKE_ARGS"].partition(" -DGGML_CUDA=on")
    assert ours.startswith("-DLLAVA_BUILD=OFF ")
    assert ours.endswith("llama_build.cmake")
    assert users == " -DLLAVA_BUILD=ON"
    assert environment["SKBUILD_BUILD_TARGETS"] == "llama;ggml"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert install.requirement(project).startswith("llama-cpp-python>=")


def test_the_first_failure_of_a_build_or_an_unreachable_index_comes_before_pips_comments() -> None:
    failed = ["FAILED: b.o", "b.cpp:3: error: no such type"]
    log = ["[1/2] g++ a.cpp", *failed, *["note"] * 30]
    assert install.failure([f"  {line}" for line in log])[:2] == failed
    retry = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError("
        "'<pip._vendor>: Failed: [Errno -3] Temporary failure in name resolution')': /simple/x/"
    )
    error = "ERROR: Could not find a version that satisfies the requirement x (from versions: none)"
    log = [f"  {retry}", f"  {error}", "  error: subprocess-exited-with-error"]
    assert install.failure(log) == [retry]
    assert install.failure(log[1:]) == [error]


def test_a_failed_step_reports_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LOG", tmp_path / "log")
    with pytest.raises(install.InstallFailed, match=r"^Trying failed [\s\S]*no-such-package"):
        install.pip(["install", "--no-index", "no-such-package"], "Trying")
    assert (
        f"$ {sys.executable} -m pip install --no-index no-such-package" in install.LOG.read_text()
    )
