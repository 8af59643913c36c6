"""Measures pairs: a method of ours and a program of llama.cpp, alternating on the same prompts."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from batching.errors import SpeculationError
from batching.llama.model import Model
from speculation.bench.prompt_file import Prompt
from speculation.bench.results import Skipped
from speculation.bench.run import generate
from speculation.chat.template import TRANSCRIPT_TEMPLATE, render_messages
from speculation.drafter import Method
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.methods.lookahead import LookaheadParams
from speculation.sampling import SamplingParams
from tools.compare import programs
from tools.compare.programs import Figures, Program, ProgramFailed, Settings

HEADROOM = 128  # KV cells for a step's rows beyond the text
MIN_TOKENS = 3  # shortest reply that can be timed
MAX_FAILURES = 3  # a comparison that has only failed is given up after this many
PLAIN, GREEDY = parse_method("ar"), SamplingParams()


class NotComparable(SpeculationError):
    """A pair whose two sides did not do the same work."""


@dataclass(frozen=True)
class Pair:
    """One run of a method and one of its program, back to back.

    first      which ran first: ours or theirs
    same_text  whether the shorter text is a prefix of the other; None = the program prints no text
    """

    prompt_id: str
    repeat: int
    first: str
    ours: Figures
    theirs: Figures
    same_text: bool | None

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours.tokens_per_second / self.theirs.tokens_per_second

    def fields(self) -> dict[str, Any]:
        """The JSON fields of the pair, without the texts."""
        fields = dataclasses.asdict(self)
        for side in ("ours", "theirs"):
            del fields[side]["text"]
        return {**fields, "ratio": self.ratio}


@dataclass(frozen=True)
class Failure:
    """A failed pair, and why."""

    prompt_id: str
    repeat: int
    reason: str


@dataclass
class Comparison:
    """A method and its program, with the pairs measured so far.

    flags  the program's flags for the method's parameters
    """

    method: Method
    program: Program
    file: Path
    flags: Sequence[str] = ()
    pairs: list[Pair] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def given_up(self) -> bool:
        """Whether it is abandoned, having only failed."""
        return not self.pairs and len(self.failures) >= MAX_FAILURES

    @property
    def ratio(self) -> float | None:
        """The median of the pairs' ratios; None without pairs."""
        return median(pair.ratio for pair in self.pairs) if self.pairs else None

    def fields(self) -> dict[str, Any]:
        """The JSON fields of the comparison."""
        ratios = [pair.ratio for pair in self.pairs]
        return {
            "method": str(self.method),
            "program": self.program.name,
            "ratio_median": self.ratio,
            "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None),
            "pairs": [pair.fields() for pair in self.pairs],
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
        }


@dataclass(frozen=True)
class Task:
    """A prompt for both sides, as text and as the tokens that llama.cpp makes of it."""

    prompt_id: str
    text: str
    tokens: Sequence[int]


def tasks(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    raw: bool,
    n_ctx: int,
    n_predict: int,
    thinking: bool | None = None,
) -> tuple[list[Task], list[Skipped]]:
    """The prompts' first turns, and those skipped for lack of room for ``n_predict`` tokens."""
    fit, skipped = [], []
    for prompt in prompts:
        text = prompt_text(model, prompt.turns[0], raw=raw, thinking=thinking)
        tokens = model.tokenize(text, add_special=True, parse_special=True)
        needed = len(tokens) + n_predict + HEADROOM
        if needed > n_ctx:
            reason = f"{needed} cells needed, the context has {n_ctx}; raise --ctx"
            skipped.append(Skipped(prompt.id, prompt.category, reason))
        else:
            fit.append(Task(prompt.id, text, tokens))
    return fit, skipped


def prompt_text(model: Model, message: str, *, raw: bool, thinking: bool | None = None) -> str:
    """The rendered prompt, for a program that parses control tokens in its text.

    A BOS written by the template is removed if the tokenizer adds one, or there would be two.
    """
    if raw:
        return message
    bos, eos = (_piece(model, name) for name in ("bos", "eos"))
    text = render_messages(
        model.chat_template or TRANSCRIPT_TEMPLATE,
        [{"role": "user", "content": message}],
        bos_token=bos,
        eos_token=eos,
        thinking=thinking,
    )
    return text.removeprefix(bos) if bos and model.add_bos else text


def measure(
    engine: Engine,
    todo: Sequence[Task],
    comparisons: Sequence[Comparison],
    settings: Settings,
    n_predict: int,
    repeat: int,
) -> Iterator[None]:
    """Add pairs to the comparisons, or failures; yields after each.

    A comparison is abandoned after MAX_FAILURES failures without a success.
    """
    with tempfile.TemporaryDirectory() as folder:
        prompt_file = Path(folder) / "prompt.txt"
        for task in todo:
            prompt_file.write_bytes(task.text.encode())
            plain = generate(engine, task.tokens, PLAIN, GREEDY, n_predict)
            n_tokens = len(plain.token_ids)
            for number in range(repeat):
                for comparison in comparisons:
                    if not comparison.given_up:
                        _add_pair(engine, task, comparison, settings, prompt_file, n_tokens, number)
                    yield


def same_text(theirs: bytes, ours: bytes) -> bool:
    """Whether one printed text is a prefix of the other, ignoring surrounding white space."""
    a, b = (text.replace(b"\r\n", b"\n").strip() for text in (theirs, ours))
    return a.startswith(b) or b.startswith(a)


def window_mismatch(window: Mapping[str, int], method: Method) -> str | None:
    """How the program's W, N and G differ from the method's parameters, or None.

    Values missing from the log are ignored: other lines can be printed in between.
    """
    params = method.params
    if not isinstance(params, LookaheadParams):
        return None
    ours = {"W": params.window, "N": params.ngram, "G": params.guesses}
    if all(ours[letter] == value for letter, value in window.items()):
        return None
    return f"it was compiled with {_listed(window)}, but the method has {_listed(ours)}"


def _add_pair(
    engine: Engine,
    task: Task,
    comparison: Comparison,
    settings: Settings,
    prompt_file: Path,
    n_tokens: int,
    number: int,
) -> None:
    program, method = comparison.program, comparison.method
    n_before = len(comparison.pairs) + len(comparison.failures)
    ours_first = n_before % 2 == 1  # theirs, ours, ours, theirs, theirs, ours, ...
    try:
        if n_tokens < MIN_TOKENS:
            raise NotComparable(
                f"the reply has {n_tokens} tokens; timing needs {MIN_TOKENS} or more"
            )
        # The method may get another setting of flash attention than the method before.
        generate(engine, task.tokens[:1], method, GREEDY, 1)
        arguments = programs.command(
            program,
            comparison.file,
            replace(settings, flash_attn=engine.context.flash_attn),
            prompt_file=prompt_file,
            n_prompt=len(task.tokens),
            n_tokens=n_tokens,
            more=comparison.flags,
        )
        if ours_first:
            ours = _ours(engine, task, method, n_tokens)
            theirs = programs.run(program, arguments, len(task.tokens))
        else:
            theirs = programs.run(program, arguments, len(task.tokens))
            ours = _ours(engine, task, method, n_tokens)
        mismatch = window_mismatch(theirs.window, method)
        if mismatch is not None:
            raise NotComparable(f"{program.name}: {mismatch}")
    except (ProgramFailed, NotComparable) as error:
        reason = _without_folders(str(error), [prompt_file, settings.model, comparison.file])
        comparison.failures.append(Failure(task.prompt_id, number, reason))
        return
    same = None if theirs.text is None else same_text(theirs.text, ours.text or b"")
    first = "ours" if ours_first else "theirs"
    comparison.pairs.append(Pair(task.prompt_id, number, first, ours, theirs, same))


def _ours(engine: Engine, task: Task, method: Method, n_tokens: int) -> Figures:
    """Our results, with the text of prompt and continuation as the programs print it.

    The programs decode two tokens to warm up before they start timing, and so do we: the first
    decode after a pause takes several milliseconds longer, while llama.cpp's threads wake up.
    """
    generate(engine, task.tokens[:1], PLAIN, GREEDY, 2)
    generation = generate(engine, task.tokens, method, GREEDY, n_tokens)
    stats = generation.stats
    n_counted = stats.n_tokens - stats.n_first
    if not n_counted:
        raise NotComparable(
            f"{method} generated all {stats.n_first} tokens in one step; nothing to time"
        )
    text = engine.model.detokenize([*task.tokens, *generation.token_ids])
    return Figures(len(task.tokens), n_counted, stats.tokens_per_second, text)


def _piece(model: Model, name: str) -> str:
    token = model.special_token(name)
    return "" if token is None else model.piece(token).decode("utf-8", "replace")


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items()) or "no W, N, G"


def _without_folders(text: str, files: Sequence[Path]) -> str:
    """File names instead of paths: the text goes into the JSON."""
    for file in files:
        text = re.sub(re.escape(str(file.parent)) + r"[/\\]", "", text)
    return text
