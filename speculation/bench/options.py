"""The flags of the benchmark, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from batching.llama.context import FLASH_ATTN, ContextParams
from speculation.bench.prompt_file import BUILTIN, Prompt, read_prompts, select_prompts
from speculation.bench.run import Plan, with_baseline
from speculation.bench.suites import SUITES
from speculation.bench.suites.suite import Suite
from speculation.methods import Method, load_method_file, parse_method
from speculation.registry import PAIRED, default_model
from speculation.sampling import SamplingParams

DEFAULT_METHODS = tuple(SUITES["builtin"].methods)
DEFAULTS = {"n_predict": 128, "limit": None, "raw": False, "categories": None}

DESCRIPTION = """\
Measure what speculative decoding methods gain over plain decoding, on this machine.

Every method continues the same prompts, one prompt after the other, and is compared with plain
decoding (method ar), which always runs: how much faster, why, and whether the text is the same.
"""

EPILOG = """\
examples
  python -m speculation.bench --limit 2
      the default methods on two of the built-in prompts of each category
  python -m speculation.bench --model qwen2.5-7b-instruct --methods prompt-lookup \\
      "lookahead:window=7,ngram=5,guesses=7" --categories chat edit-code --json result.json
      a model of models.txt, a method with its own parameters, two categories, the figures kept
  python -m speculation.bench --model story.gguf --raw --prompt "Once upon a time" --repeat 5
      a model without a chat format, one prompt, five runs of each method
  python -m speculation.bench --repeat 3 --json result.json --resume --report report
      a long run that may be broken off and started again, with a page of figures in the end
  python -m speculation.bench --suite lookup --report report
      which rule of prompt lookup is best here
  LLAMA_CPP_LIB_PATH=build/bin python -m speculation.bench --compare-llama-cpp build/bin --limit 2
      our methods beside llama.cpp's own programs, on the very same library

methods
  A name, or name:parameter=value,parameter=value. What is left out has its default.
  FILE.py:SPEC, or FILE.py:SPEC:parameter=value, is a method of your own (examples/README.md).
  --list-methods shows the names, the parameters and what they do. A method may be given several
  times with different parameters.

suites
  {suites}
  All but builtin have their own methods; context and cost have their own prompts too, and scaling
  and lookup take the first one or two of each category unless --limit says otherwise.

prompt files
  JSON Lines, each line one of
    {"prompt": "..."}                                          a single prompt
    {"question_id": 81, "category": "writing", "turns": [...]} a conversation, as in Spec-Bench
  question_id and category may go with "prompt" too. All turns of a conversation are measured, each
  as a prompt of its own (called 81, 81#2, 81#3). The replies that stand before a turn are plain
  decoding's, for every method, so that all methods continue the same text. With --raw the
  conversation is its turns and replies as plain text, one a line.
  A prompt that leaves no room for --n-predict tokens in the context is skipped, and says so.

how it is measured
  After a warm-up, every method runs once on a prompt, in an order that rotates, --repeat times,
  then comes the next prompt. The cache is emptied before each run. tokens/s is generated tokens
  over decoding time, counted alike for all methods; the prefill is not part of it.

the table, one for each category and one for all
  tokens/s     all generated tokens over all decoding seconds
  speed-up     tokens/s over plain decoding's on the same prompt (medians over the repeats): mean
               and standard deviation over the prompts
  overall      tokens/s over plain decoding's, all prompts together
  tokens/step  tokens generated for each decode of the model; 1 for plain decoding
  accept       draft tokens that became text, of those drafted
  prefill      the time to the first token, ms a run: the prompt and the first step. All other
               figures but tokens/step and accept leave that step out
  draft, build, decode, verify, commit
               the phases of a step, ms: drafting, making the batch, llama.cpp's decode, choosing
               tokens, tidying the cache
  outside      all time of a step outside llama.cpp's decode, µs
Below it stands every run whose text is not plain decoding's: where, the two tokens, and how far
apart plain decoding had their logits. Methods are lossless, but batches of several tokens are
rounded differently, so a near-tie may fall the other way. To see whether it is that, compare with
--kv-type f32 --flash-attn off and an F32 model.

For a method that drafts from several sources (auto) a table says how many rows it decoded in a step
and whose drafts were accepted.

the JSON
  model, device, settings, started, complete, runs, curves, summary and skipped. A run has method,
  prompt_id, category, repeat, tokens (ids; n_tokens of them), n_first (those of the first step,
  whose time is in prefill_seconds), n_steps, n_drafted, n_accepted, prefill_seconds,
  decode_seconds, phase_seconds, rows_histogram (rows of a step: steps), tokens_histogram (tokens of
  a step: steps), accepted_by_source, same_as_ar and first_difference: null or index, ar_token,
  token and logit_gap. curves are those of the suite cost.
  The file is renewed after every round of methods on a prompt and is whole at every moment.
  --resume goes on with it, with the same flags, after Ctrl-C, an error or a power cut; when nothing
  is left to measure it shows the tables again, and --report makes its page from it.

Ctrl-C ends the measuring; what is done by then is shown and written. Exit code: 0, 2 after an
error, 130 after Ctrl-C.
"""


@dataclass(frozen=True)
class Options:
    """The command line, read. ``prompt`` texts take the place of the file ``prompts``."""

    suite: Suite
    model: str
    methods: list[Method]
    prompts: str
    prompt: list[str] | None
    limit: int | None
    categories: list[str] | None
    n_predict: int
    raw: bool
    thinking: bool | None
    draft_model: str | None
    heads: list[str]
    no_mtp: bool
    ctx: int
    threads: int | None
    gpu_layers: int | None
    kv_type: str
    flash_attn: str
    temperature: float
    seed: int
    repeat: int
    json: Path | None
    resume: bool
    report: Path | None
    compare_llama_cpp: Path | None
    trace_batches: Path | None
    list_methods: bool

    def context_params(self) -> ContextParams:
        return ContextParams(
            n_ctx=self.ctx,
            n_threads=self.threads,
            kv_type=self.kv_type,
            flash_attn=self.flash_attn,
        )

    def plan(self) -> Plan:
        sampling = SamplingParams(temperature=self.temperature, seed=self.seed)
        methods = with_baseline(self.methods)
        return Plan(methods, sampling, self.n_predict, self.repeat, self.raw, self.thinking)

    def read_prompts(self) -> list[Prompt]:
        """The prompts asked for. Raises PromptFileError or InvalidParameter."""
        if self.prompt is not None:
            if not all(self.prompt):
                raise InvalidParameter("--prompt is empty; give a text")
            texts = enumerate(self.prompt, start=1)
            prompts = [Prompt(f"prompt-{number}", "prompts", (text,)) for number, text in texts]
        else:
            prompts = read_prompts(self.prompts)
        return select_prompts(prompts, self.categories, self.limit)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; leaves the program with code 2 when it is wrong, as argparse does."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    suite = values["suite"] = SUITES[values["suite"]]
    values["heads"] = [PAIRED] if values["heads"] == [] else values["heads"] or []
    for name in _not_for(suite, values):
        parser.error(f"--suite {suite.name} has its own {name}; leave --{name} out")
    if suite.no_runs:
        for name in _of_runs(values):
            parser.error(f"--suite {suite.name} generates nothing; leave --{name} out")
    if values["resume"] and values["json"] is None:
        parser.error("--resume goes on with the file of --json; give --json FILE")
    if values["raw"] and values["thinking"] is not None:
        parser.error("--thinking is told by the chat template, and --raw has none; leave one out")
    if values["compare_llama_cpp"] is not None:
        for name in _not_compared(values):
            parser.error(f"--compare-llama-cpp measures without --{name}; leave it out")
        values["methods"] = values["methods"] or []  # the comparison has its own
    if values["methods"] is None:
        values["methods"] = [parse_method(name) for name in suite.methods]
    for name, default in {**DEFAULTS, **suite.defaults}.items():
        if values[name] is None:
            values[name] = default
    return Options(**values)


def _not_for(suite: Suite, values: dict[str, Any]) -> list[str]:
    """Flags that were given and that the suite decides itself."""
    names = ["methods"] if suite.own_methods else []
    if suite.own_prompts:
        names += ["prompts", "prompt", "limit", "categories"]
    return [name for name in names if values[name] not in (None, BUILTIN)]


def _of_runs(values: dict[str, Any]) -> list[str]:
    """Flags that were given and that say how runs are made."""
    unless_given = {"n_predict": None, "repeat": 1, "temperature": 0, "seed": 0, "raw": None}
    given = [name for name, value in unless_given.items() if values[name] != value]
    return [name.replace("_", "-") for name in given]


def _not_compared(values: dict[str, Any]) -> list[str]:
    """Flags that were given and have no meaning beside ``--compare-llama-cpp``."""
    given = {
        "suite": values["suite"] is not SUITES["builtin"],
        "temperature": values["temperature"] != 0,
        "resume": values["resume"],
        "report": values["report"] is not None,
        "trace-batches": values["trace_batches"] is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m speculation.bench",
        description=DESCRIPTION,
        epilog=EPILOG.replace(
            "{suites}", "\n  ".join(f"{name:8} {suite.title}" for name, suite in SUITES.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_what(parser.add_argument_group("what is measured"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_model(parser.add_argument_group("model and context"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--suite",
        choices=tuple(SUITES),
        default="builtin",
        help="what is asked, see below (builtin)",
    )
    group.add_argument(
        "--methods",
        nargs="+",
        type=_method,
        metavar="METHOD",
        help=f"methods to compare; ar is added where it is missing ({' '.join(DEFAULT_METHODS)})",
    )
    group.add_argument(
        "--n-predict",
        type=_positive,
        metavar="N",
        help="most tokens a run generates (128; 64 in the suite context)",
    )
    group.add_argument(
        "--repeat",
        type=_positive,
        default=1,
        metavar="R",
        help="runs of each method on each prompt (1)",
    )
    group.add_argument(
        "--compare-llama-cpp",
        type=Path,
        metavar="DIR",
        help="instead of all this: the speed of ar, prompt-lookup, lookahead and draft over that "
        "of llama.cpp's own programs in DIR, in turn on the first turns (docs/compare.md)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the most likely token; above it one is drawn (0)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the draws; the same seed gives the same text with every method (0)",
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        default=BUILTIN,
        metavar="FILE|builtin",
        help="prompts in JSON Lines, see below, or the ones that come with the program (builtin)",
    )
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt given here instead of a file; may be repeated",
    )
    group.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help="only the first N prompts of each category, with all their turns (all)",
    )
    group.add_argument(
        "--categories", nargs="+", metavar="NAME", help="only prompts of these categories (all)"
    )
    group.add_argument(
        "--raw",
        action="store_true",
        default=None,
        help="continue prompts as they are, without chat template",
    )
    group.add_argument(
        "--thinking",
        type=_switch,
        metavar="on|off",
        help="tell a model that can be told whether to think before it answers (its own choice)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default=default_model(),
        metavar="PATH|NAME",
        help="a GGUF file, or a name of models.txt (%(default)s)",
    )
    group.add_argument(
        "--draft-model",
        nargs="?",
        const=PAIRED,
        metavar="PATH|NAME",
        help="a smaller model of the same family, for the methods draft and auto; with nothing "
        "after it, the one that models.txt names for the model (none)",
    )
    group.add_argument(
        "--heads",
        nargs="*",
        metavar="PATH|NAME",
        help="drafting heads trained on the model, one file a method, see docs/heads.md; with "
        "nothing after it, those that models.txt names for the model (none)",
    )
    group.add_argument(
        "--no-mtp",
        action="store_true",
        help="leave the model's own layers for multi-token prediction, if any, out of memory",
    )
    group.add_argument(
        "--ctx",
        type=int,
        default=0,
        metavar="N",
        help="tokens the context holds; 0 = as trained, 8192 at most (0)",
    )
    group.add_argument(
        "--threads", type=_positive, metavar="N", help="CPU threads (one a physical core)"
    )
    group.add_argument(
        "--gpu-layers", type=_count, metavar="N", help="layers on the GPU, if there is one (all)"
    )
    group.add_argument(
        "--kv-type",
        choices=("f16", "f32", "q8_0"),
        default="f16",
        help="number format of the KV cache (f16)",
    )
    group.add_argument(
        "--flash-attn",
        choices=tuple(FLASH_ATTN),
        default="auto",
        help="flash attention; auto measures which is faster when the model is loaded (auto)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="keep all runs and the summary in FILE, up to date at every moment",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="keep the runs that are in the file of --json and measure the rest; begins where "
        "there is no file yet",
    )
    group.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write a page with figures and all tables to DIR/index.html, the figures as SVG "
        "beside it (needs matplotlib)",
    )
    group.add_argument(
        "--trace-batches",
        type=Path,
        metavar="FILE",
        help="append a line of JSON to FILE for every llama_decode, warm-up included: "
        "[[token, position, [sequences], output], ...]",
    )
    group.add_argument(
        "--list-methods", action="store_true", help="show methods and their parameters, and end"
    )


def _method(text: str) -> Method:
    try:
        return parse_method(load_method_file(text))
    except InvalidParameter as error:  # a ValueError too, whose text argparse would hide
        raise argparse.ArgumentTypeError(str(error)) from None


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is not right; give on or off")
    return text == "on"


def _positive(text: str) -> int:
    return _at_least(1, text)


def _count(text: str) -> int:
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not right; give a whole number from {low}")
    return int(text)
