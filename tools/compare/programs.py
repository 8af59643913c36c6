"""llama.cpp's own programs: finding them, starting them, reading their figures.

Knows nothing of our methods but the name of the one that each program is compared with.
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

# Another thread writes a program's log, and the program may end before it comes to the figures: the
# faster the model and the busier the machine, the more often.
TRIES = 10
ALL_LAYERS = 999
_DECODED = re.compile(r"decoded +(\d+) tokens in +[\d.]+ seconds, speed: +([\d.]+) t/s")
# Not its speed: llama-lookup counts the reply's tokens in that as well.
_ENCODED = re.compile(r"encoded +(\d+) tokens in +([\d.]+) seconds")
_WINDOW = re.compile(r"\b([WNG]) = +(\d+)\s*$", re.MULTILINE)
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_LIBRARY_PATHS = {"linux": "LD_LIBRARY_PATH", "darwin": "DYLD_LIBRARY_PATH"}


class ProgramFailed(SpeculationError):
    """A program of llama.cpp ended with an error, or without saying how fast it was."""


@dataclass(frozen=True)
class Program:
    """A program of llama.cpp and how its figures compare with ours.

    name         of the file
    method       our method, by name
    n_more       tokens it generates beyond what ``-n`` asks for
    n_free       of the tokens it counts, those that took no decode
    n_uncounted  tokens it generates and does not count
    drafts_by    its own name for the way it drafts, where it has several
    """

    name: str
    method: str
    n_more: int = 0
    n_free: int = 0
    n_uncounted: int = 0
    drafts_by: str = ""


PROGRAMS = {
    program.method: program
    for program in (
        Program("llama-bench", "ar"),
        Program("llama-lookup", "prompt-lookup", n_more=1, n_free=1),
        Program("llama-lookahead", "lookahead", n_more=2, n_uncounted=1),
        Program("llama-speculative-simple", "draft", n_more=1, drafts_by="draft-simple"),
        Program("llama-speculative-simple", "eagle-3", n_more=1, drafts_by="draft-eagle3"),
        Program("llama-speculative-simple", "mtp", n_more=1, drafts_by="draft-mtp"),
        Program("llama-speculative-simple", "dflash", n_more=1, drafts_by="draft-dflash"),
    )
}


@dataclass(frozen=True)
class Settings:
    """What both sides have in common.

    n_gpu_layers  None: all layers
    drafts        the file that drafts, by method; mtp may do without
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
    """What a run of a program yielded.

    n_prompt           prompt tokens it read
    n_tokens           tokens it generated in the time it counts, each at the cost of a decode
    tokens_per_second  of these
    with_prompt        all tokens over all of the time, the prompt's too; None = it reads none
    text               what it printed: the prompt and its continuation; None = nothing
    window             W, N and G of llama-lookahead, else empty
    restored           tokens per second where the prompt's state was put back and nothing was read
                       before, of llama-bench; else None
    """

    n_prompt: int
    n_tokens: int
    tokens_per_second: float
    with_prompt: float | None = None
    text: bytes | None = None
    window: Mapping[str, int] = field(default_factory=dict)
    restored: float | None = None


def find(program: Program, folder: Path) -> Path | None:
    """The program's file in ``folder``, or None where it is missing or cannot be run."""
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
    """The command line that generates ``n_tokens`` after the prompt, which is read as it stands.

    ``more`` flags are appended.
    """
    layers = ALL_LAYERS if settings.n_gpu_layers is None else settings.n_gpu_layers
    threads, flash_attn = str(settings.n_threads), "on" if settings.flash_attn else "off"
    common = [str(file), "-m", str(settings.model), "-t", threads, "-ngl", str(layers)]
    common += ["-fa", flash_attn, "-ctk", settings.kv_type, "-ctv", settings.kv_type]
    if program.method == "ar":  # it warms up; the first token comes with the prompt
        work = ["-p", "0", "-n", str(n_tokens - 1), "-d", str(n_prompt), "-r", "2"]
        return [*common, *work, "-o", "json", *more]
    work = ["-bf", str(prompt_file), "--no-escape", "-n", str(n_tokens - program.n_more)]
    greedy = ["--temp", "0", "--samplers", "top_k", "--top-k", "1"]
    draft: list[str] = []
    if program.drafts_by:
        file_that_drafts = settings.drafts.get(program.method)
        draft = [] if file_that_drafts is None else ["-md", str(file_that_drafts)]
        draft += ["--spec-type", program.drafts_by]
        draft += ["-td", threads, "-tbd", threads, "-ngld", str(layers)]
        draft += ["-ctkd", settings.kv_type, "-ctvd", settings.kv_type]
    context = ["-tb", threads, "-c", str(settings.n_ctx)]
    return [*common, *context, *work, *greedy, *draft, *more]


def run(program: Program, arguments: Sequence[str], n_prompt: int) -> Figures:
    """Run the program to its end and read its figures; a run without any is repeated.

    Raises ProgramFailed when it cannot be started, ends with an error, never shows figures, or read
    another number of prompt tokens than ``n_prompt``.
    """
    for _ in range(TRIES):
        done = _run(arguments)
        if done.returncode:
            raise ProgramFailed(
                f"{program.name} ended with code {done.returncode}: {_complaint(done)}"
            )
        figures = read(program, done.stdout, done.stderr, n_prompt)
        if figures is None:
            continue
        if figures.n_prompt != n_prompt:
            raise ProgramFailed(
                f"{program.name} read {figures.n_prompt} prompt tokens and {n_prompt} were meant"
            )
        return figures
    raise ProgramFailed(f"{program.name} ended {TRIES} times without showing figures")


def read(program: Program, stdout: bytes, stderr: bytes, n_prompt: int) -> Figures | None:
    """The figures in what a program printed, or None where there are none.

    llama-bench says nothing of a prompt: it is taken to be the one that was meant.
    """
    if program.method == "ar":
        return _read_bench(stdout, n_prompt)
    printed = (stdout + b"\n" + stderr).decode("utf-8", "replace")
    encoded, decoded = _ENCODED.search(printed), _DECODED.search(printed)
    if encoded is None or decoded is None or not float(decoded[2]):
        return None
    n_counted, rate = int(decoded[1]), float(decoded[2])
    n_tokens = n_counted - program.n_free
    seconds = float(encoded[2]) + n_counted / rate
    return Figures(
        n_prompt=int(encoded[1]),
        n_tokens=n_tokens,
        tokens_per_second=rate * n_tokens / n_counted,
        with_prompt=(n_counted + program.n_uncounted) / seconds,
        text=_COLOUR.sub(b"", stdout),
        window={name: int(value) for name, value in _WINDOW.findall(printed)},
    )


def version(file: Path) -> str | None:
    """What a program says of its version, on one line, or None."""
    try:
        done = _run([str(file), "--version"])
    except ProgramFailed:
        return None
    printed = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
    found = re.search(r"^version: (.+)$", printed, re.MULTILINE)
    return found[1].strip() if found else None


def environment(folder: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: it finds the libraries beside it, and takes settings from its
    flags alone, not from variables ``LLAMA_ARG_...``."""
    inner = {name: value for name, value in outer.items() if not name.startswith("LLAMA_ARG_")}
    variable = _LIBRARY_PATHS.get(sys.platform)
    if variable is not None:
        inner[variable] = os.pathsep.join(filter(None, [str(folder), inner.get(variable)]))
    return inner


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
        rate, restored = map(float, test["samples_ts"])
        n_tokens = int(test["n_gen"])
    except (ValueError, LookupError, TypeError):
        return None
    return Figures(n_prompt, n_tokens, rate, restored=restored) if rate and restored else None


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    """The last line that tells of an error, else the last line."""
    lines = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()] or ["it printed nothing"]
    wrong = [line for line in lines if re.search(r"\bE\b|error|fail|invalid", line)]
    return (wrong or lines)[-1]
