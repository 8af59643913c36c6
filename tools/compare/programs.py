"""Finds and runs llama.cpp's own programs, and parses their output.

Of our methods, it knows only the name of the one that each program is compared with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batching.errors import SpeculationError

# A program's log is written by another thread, and the program can exit before the speeds are
# written; more often with fast models and on busy machines.
TRIES = 10
ALL_LAYERS = 999
_DECODED = re.compile(r"decoded +(\d+) tokens in +[\d.]+ seconds, speed: +([\d.]+) t/s")
_ENCODED = re.compile(r"encoded +(\d+) tokens")
_WINDOW = re.compile(r"\b([WNG]) = +(\d+)\s*$", re.MULTILINE)
_LIBRARY = re.compile(r"(lib)?(llama|ggml(-[\w-]+)?)\.(so|dylib|dll)")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_LIBRARY_PATHS = {"linux": "LD_LIBRARY_PATH", "darwin": "DYLD_LIBRARY_PATH"}


class ProgramFailed(SpeculationError):
    """A program of llama.cpp failed, or did not print its speed."""


@dataclass(frozen=True)
class Program:
    """A program of llama.cpp and how its counts differ from ours.

    name       file name
    method     name of our corresponding method
    n_more     tokens it generates beyond ``-n``
    n_free     counted tokens that needed no decode
    drafts_by  its ``--spec-type``, if it has several
    """

    name: str
    method: str
    n_more: int = 0
    n_free: int = 0
    drafts_by: str = ""


PROGRAMS = {
    program.method: program
    for program in (
        Program("llama-bench", "ar"),
        Program("llama-lookup", "prompt-lookup", n_more=1, n_free=1),
        Program("llama-lookahead", "lookahead", n_more=2),
        Program("llama-speculative-simple", "draft", n_more=1, drafts_by="draft-simple"),
        Program("llama-speculative-simple", "eagle-3", n_more=1, drafts_by="draft-eagle3"),
        Program("llama-speculative-simple", "mtp", n_more=1, drafts_by="draft-mtp"),
        Program("llama-speculative-simple", "dflash", n_more=1, drafts_by="draft-dflash"),
    )
}


@dataclass(frozen=True)
class Settings:
    """Settings of both sides.

    n_gpu_layers  None = all layers
    drafts        the draft model or heads file by method; mtp may have none
    """

    model: Path
    n_ctx: int
    n_threads: int
    kv_type: str
    flash_attn: bool
    n_gpu_layers: int | None = None
    drafts: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """The results of a run.

    n_prompt           prompt tokens it read
    n_tokens           tokens generated in the timed part, without free ones
    tokens_per_second  of these
    text               the printed prompt and continuation; None = it prints no text
    window             W, N and G of llama-lookahead; empty for other programs
    """

    n_prompt: int
    n_tokens: int
    tokens_per_second: float
    text: bytes | None = None
    window: Mapping[str, int] = field(default_factory=dict)


def find(program: Program, folder: Path) -> Path | None:
    """The program's file in ``folder``; None if it is missing or not executable."""
    found = shutil.which(program.name, path=str(folder.absolute()))
    return None if found is None else Path(found)


def command(
    program: Program,
    file: Path,
    settings: Settings,
    *,
    prompt_file: Path,
    n_prompt: int,
    n_tokens: int,
    more: Sequence[str] = (),
) -> list[str]:
    """The command line to generate ``n_tokens`` after the prompt, which is used verbatim.

    ``more`` flags are appended.
    """
    layers = ALL_LAYERS if settings.n_gpu_layers is None else settings.n_gpu_layers
    threads, flash_attn = str(settings.n_threads), "on" if settings.flash_attn else "off"
    common = [str(file), "-m", str(settings.model), "-t", threads, "-ngl", str(layers)]
    common += ["-fa", flash_attn, "-ctk", settings.kv_type, "-ctv", settings.kv_type]
    if program.method == "ar":  # llama-bench; one token less, since ours comes with the prompt
        work = ["-p", "0", "-n", str(n_tokens - 1), "-d", str(n_prompt), "-r", "1"]
        return [*common, *work, "-o", "json", *more]
    work = ["-bf", str(prompt_file), "--no-escape", "-n", str(n_tokens - program.n_more)]
    greedy = ["--temp", "0", "--samplers", "top_k", "--top-k", "1"]
    draft: list[str] = []
    if program.drafts_by:
        draft_file = settings.drafts.get(program.method)
        draft = [] if draft_file is None else ["-md", str(draft_file)]
        draft += ["--spec-type", program.drafts_by]
        draft += ["-td", threads, "-tbd", threads, "-ngld", str(layers)]
        draft += ["-ctkd", settings.kv_type, "-ctvd", settings.kv_type]
    context = ["-tb", threads, "-c", str(settings.n_ctx)]
    return [*common, *context, *work, *greedy, *draft, *more]


def run(program: Program, arguments: Sequence[str], n_prompt: int) -> Figures:
    """Run the program and parse its output; repeats a run that printed no speed.

    Raises ProgramFailed if it cannot be started, fails, never prints its speed, or read a number of
    prompt tokens other than ``n_prompt``.
    """
    for _ in range(TRIES):
        done = _run(arguments)
        if done.returncode:
            raise ProgramFailed(
                f"{program.name} exited with code {done.returncode}: {_error_line(done)}"
            )
        figures = read(program, done.stdout, done.stderr, n_prompt)
        if figures is None:
            continue
        if figures.n_prompt != n_prompt:
            raise ProgramFailed(
                f"{program.name} read {figures.n_prompt} prompt tokens instead of {n_prompt}"
            )
        return figures
    raise ProgramFailed(f"{program.name} ran {TRIES} times without printing its speed")


def read(program: Program, stdout: bytes, stderr: bytes, n_prompt: int) -> Figures | None:
    """Parse a program's output; None if it has no speed.

    llama-bench does not print the number of prompt tokens, so ``n_prompt`` is assumed.
    """
    if program.method == "ar":
        return _read_bench(stdout, n_prompt)
    printed = (stdout + b"\n" + stderr).decode("utf-8", "replace")
    encoded, decoded = _ENCODED.search(printed), _DECODED.search(printed)
    if encoded is None or decoded is None or not float(decoded[2]):
        return None
    n_counted = int(decoded[1])
    n_tokens = n_counted - program.n_free
    return Figures(
        n_prompt=int(encoded[1]),
        n_tokens=n_tokens,
        tokens_per_second=float(decoded[2]) * n_tokens / n_counted,
        text=_COLOUR.sub(b"", stdout),
        window={name: int(value) for name, value in _WINDOW.findall(printed)},
    )


def version(file: Path) -> str | None:
    """A program's version on one line, or None."""
    try:
        done = _run([str(file), "--version"])
    except ProgramFailed:
        return None
    printed = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
    found = re.search(r"^version: (.+)$", printed, re.MULTILINE)
    return found[1].strip() if found else None


def environment(folder: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program in ``folder``: it finds its libraries there, and no
    ``LLAMA_ARG_...`` variable changes its settings."""
    inner = {name: value for name, value in outer.items() if not name.startswith("LLAMA_ARG_")}
    variable = _LIBRARY_PATHS.get(sys.platform)
    if variable is not None:
        inner[variable] = os.pathsep.join(filter(None, [str(folder), inner.get(variable)]))
    return inner


def unlike_libraries(ours: Path, theirs: Path) -> list[str] | None:
    """Names of llama.cpp's libraries that differ between two folders, or are in one of them only.

    None if ``theirs`` has none: its programs are linked statically.
    """
    here, there = (
        {file.name: file.read_bytes() for file in folder.iterdir() if _is_library(file)}
        for folder in (ours, theirs)
    )
    names = sorted({*here, *there})
    return [name for name in names if here.get(name) != there.get(name)] if there else None


def _is_library(file: Path) -> bool:
    """Whether a file is one of the libraries, not a link to it with a version number."""
    return _LIBRARY.fullmatch(file.name) is not None and file.is_file()


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    folder = Path(arguments[0]).absolute().parent
    try:
        return subprocess.run(
            arguments,
            env=environment(folder, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        reason = error.strerror or "no reason given"
        raise ProgramFailed(f"{Path(arguments[0]).name} cannot be started: {reason}") from error


def _read_bench(stdout: bytes, n_prompt: int) -> Figures | None:
    try:
        test: Any = json.loads(stdout)[-1]
        rate = float(test["samples_ts"][0])
        n_tokens = int(test["n_gen"])
    except (ValueError, LookupError, TypeError):
        return None
    return Figures(n_prompt, n_tokens, rate) if rate else None


def _error_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """The last line of output that mentions an error, else the last line."""
    lines = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if re.search(r"\bE\b|error|fail|invalid", line)]
    return (errors or lines)[-1]
