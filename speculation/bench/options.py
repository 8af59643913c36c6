"""The benchmark's command line: flags, help, and checks of their combinations."""

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
DEFAULTS = {"prompts": BUILTIN, "n_predict": 128, "limit": None, "raw": False, "categories": None}

DESCRIPTION = """\
Measure the speed-up of speculative decoding methods over plain decoding on this machine.

Every method continues the same prompts and is compared with plain decoding (method ar), which
always runs: how much faster it is, why, and whether the text is the same.
"""

EPILOG = """\
examples
  python -m speculation.bench --limit 2
      the default methods on two of the built-in prompts of each category
  python -m speculation.bench --model qwen2.5-7b-instruct --methods prompt-lookup \\
      "lookahead:window=7,ngram=5,guesses=7" --categories chat edit-code --json result.json
      a model from models.txt, a method with parameters, two categories; results saved as JSON
  python -m speculation.bench --model story.gguf --raw --prompt "Once upon a time" --repeat 5
      a model without a chat template, one prompt, five runs of each method
  python -m speculation.bench --repeat 3 --json result.json --resume --report report
      a long run that can be interrupted and resumed, with an HTML report at the end
  python -m speculation.bench --suite lookup --report report
      which variant of prompt lookup is best here
  LLAMA_CPP_LIB_PATH=build/bin python -m speculation.bench --compare-llama-cpp build/bin --limit 2
      our methods against llama.cpp's own programs, with the same library

methods
  A name, or name:parameter=value,parameter=value. Omitted parameters have their defaults.
  FILE.py:SPEC, or FILE.py:SPEC:parameter=value, is a method of your own (examples/README.md).
  --list-methods shows all methods and their parameters. A method may be given several times with
  different parameters.

suites
  {suites}
  All but builtin choose their own methods. context and cost choose their own prompts too; scaling
  and lookup use the first one or two prompts of each category unless --limit is given.

prompt files
  JSON Lines, each line one of
    {"prompt": "..."}                                          a single prompt
    {"question_id": 81, "category": "writing", "turns": [...]} a conversation, as in Spec-Bench
  question_id and category may go with "prompt" too. Each turn of a conversation is measured as a
  prompt of its own (named 81, 81#2, 81#3). The replies before a turn are plain decoding's, so that
  all methods continue the same text. With --raw, a conversation is its turns and replies as plain
  text, one per line.
  A prompt that leaves no room for --n-predict tokens in the context is skipped and reported.

how it is measured
  After a warm-up, every method runs once per prompt and repeat, in rotating order. The cache is
  emptied before each run. tokens/s is generated tokens over decoding time, counted the same way for
  all methods; it excludes the prefill.

the table, one for each category and one for all
  tokens/s     all generated tokens over all decoding seconds
  speed-up     tokens/s relative to plain decoding on the same prompt (medians over the repeats):
               mean and standard deviation over the prompts
  overall      tokens/s relative to plain decoding, all prompts together
  tokens/step  tokens generated per decode of the model; 1 for plain decoding
  accept       acceptance rate: accepted over drafted tokens
  prefill      time to the first token, ms per run: the prompt and the first step. All other columns
               except tokens/step and accept exclude that step
  draft, build, decode, verify, commit
               time of each phase, ms per step: drafting, building the batch, llama.cpp's decode,
               choosing tokens, updating the KV cache
  outside      time outside llama.cpp's decode, µs per step
Runs whose text differs from plain decoding are listed below the tables: where, the two tokens, and
the gap between their logits in plain decoding. Methods are lossless, but batches of several tokens
round differently, so a near-tie can go the other way. To rule that out, compare with
--kv-type f32 --flash-attn off and an F32 model.

For a method with several draft sources (auto), another table shows how many rows its steps had and
which sources' drafts were accepted.

the JSON
  model, device, settings, started, complete, runs, curves, summary and skipped. A run has method,
  prompt_id, category, repeat, tokens (ids; n_tokens of them), n_first (tokens of the first step,
  whose time is part of prefill_seconds), n_steps, n_drafted, n_accepted, prefill_seconds,
  decode_seconds, phase_seconds, rows_histogram (rows per step: steps), tokens_histogram (tokens per
  step: steps), accepted_by_source, same_as_ar and first_difference: null or index, ar_token,
  token and logit_gap. curves come from the suite cost.
  The file is updated after every round and is always valid JSON. --resume continues it with the
  same flags after Ctrl-C, an error or a power cut. If nothing is left to measure, it prints the
  tables again, and --report writes its page.

Ctrl-C stops measuring; results so far are shown and saved. Exit code: 0, 2 after an error, 130
after Ctrl-C.
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line. ``prompt``, if given, replaces the file ``prompts``."""

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
    memory: Path | None
    ctx: int
    threads: int | None
    gpu_layers: int | None
    device: str | None
    draft_device: str | None
    rpc: str
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
    for name in _fixed_by_suite(suite, values):
        parser.error(f"--suite {suite.name} has its own {name}; leave --{name} out")
    if suite.no_runs:
        for name in _generation_flags(values):
            parser.error(f"--suite {suite.name} generates nothing; leave --{name} out")
    if values["resume"] and values["json"] is None:
        parser.error("--resume needs a file to continue; give --json FILE")
    if values["raw"] and values["thinking"] is not None:
        parser.error("--thinking needs the chat template, and --raw does not use it; drop one")
    if values["compare_llama_cpp"] is not None:
        for name in _unsupported_by_compare(values):
            parser.error(f"--compare-llama-cpp does not support --{name}; leave it out")
        values["methods"] = values["methods"] or []  # the comparison has its own
    if values["methods"] is None:
        values["methods"] = [parse_method(name) for name in suite.methods]
    for name, default in {**DEFAULTS, **suite.defaults}.items():
        if values[name] is None:
            values[name] = default
    return Options(**values)


def _fixed_by_suite(suite: Suite, values: dict[str, Any]) -> list[str]:
    """Given flags that the suite does not allow, because it chooses these itself."""
    names = ["methods"] if suite.own_methods else []
    if suite.own_prompts:
        names += ["prompts", "prompt", "limit", "categories"]
    return [name for name in names if values[name] not in (None, BUILTIN)]


def _generation_flags(values: dict[str, Any]) -> list[str]:
    """Given flags that apply to generation only."""
    unless_given = {"n_predict": None, "repeat": 1, "temperature": 0, "seed": 0, "raw": None}
    given = [name for name, value in unless_given.items() if values[name] != value]
    return [name.replace("_", "-") for name in given]


def _unsupported_by_compare(values: dict[str, Any]) -> list[str]:
    """Given flags that ``--compare-llama-cpp`` does not support."""
    given = {
        "suite": values["suite"] is not SUITES["builtin"],
        "temperature": values["temperature"] != 0,
        "resume": values["resume"],
        "report": values["report"] is not None,
        "trace-batches": values["trace_batches"] is not None,
        "memory": values["memory"] is not None,
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
    _add_measurement(parser.add_argument_group("what is measured"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_model(parser.add_argument_group("model and context"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_measurement(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--suite",
        choices=tuple(SUITES),
        default="builtin",
        help="what to measure, see below (builtin)",
    )
    group.add_argument(
        "--methods",
        nargs="+",
        type=_method,
        metavar="METHOD",
        help=f"methods to compare; ar is always included ({' '.join(DEFAULT_METHODS)})",
    )
    group.add_argument(
        "--n-predict",
        type=_positive,
        metavar="N",
        help="maximum tokens per run (128; 64 in the suite context)",
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
        help="instead, compare ar, prompt-lookup, lookahead and draft with llama.cpp's own "
        "programs in DIR, alternating, on first turns only (docs/measure.md)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy (0)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="sampling seed; a seed gives the same text with every method (0)",
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        metavar="FILE|builtin|novel|memory",
        help="prompts in JSON Lines, see below, or built-in ones: builtin; novel, whose replies "
        "repeat little; memory (builtin; memory in the suite memory)",
    )
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt, instead of a file; may be repeated",
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
        help="continue prompts as plain text, without the chat template",
    )
    group.add_argument(
        "--thinking",
        type=_switch,
        metavar="on|off",
        help="turn reasoning on or off, if the chat template supports it (the model's default)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default=default_model(),
        metavar="PATH|NAME",
        help="a GGUF file or a name in models.txt (%(default)s)",
    )
    group.add_argument(
        "--draft-model",
        nargs="?",
        const=PAIRED,
        metavar="PATH|NAME",
        help="a smaller model with the same vocabulary, for the methods draft and auto; without "
        "a value, the one paired with the model in models.txt (none)",
    )
    group.add_argument(
        "--heads",
        nargs="*",
        metavar="PATH|NAME",
        help="drafting heads trained for the model, one file per method, see docs/heads.md; "
        "without a value, those paired with the model in models.txt (none)",
    )
    group.add_argument(
        "--no-mtp",
        action="store_true",
        help="do not load the model's own multi-token prediction layers",
    )
    group.add_argument(
        "--memory",
        type=Path,
        metavar="FILE",
        help="start with the texts that FILE has for the methods suffix and auto, and save them "
        "with those of this run at the end (start with none)",
    )
    group.add_argument(
        "--ctx",
        type=int,
        default=0,
        metavar="N",
        help="context size in tokens; 0 = as trained, 8192 at most (0)",
    )
    group.add_argument(
        "--threads", type=_positive, metavar="N", help="CPU threads (one per physical core)"
    )
    group.add_argument(
        "--gpu-layers", type=_count, metavar="N", help="layers on the GPU, if any (all that fit)"
    )
    group.add_argument(
        "--device",
        metavar="NAME,…",
        help="devices for these layers, as `speculation devices` lists them, or none (all GPUs)",
    )
    group.add_argument(
        "--draft-device", metavar="NAME,…", help="those of the draft model (the same)"
    )
    group.add_argument(
        "--rpc",
        default="",
        metavar="HOST:PORT,…",
        help="RPC workers that compute layers of the model (docs/machines.md)",
    )
    group.add_argument(
        "--kv-type",
        choices=("f16", "f32", "q8_0"),
        default="f16",
        help="data type of the KV cache (f16)",
    )
    group.add_argument(
        "--flash-attn",
        choices=tuple(FLASH_ATTN),
        default="auto",
        help="flash attention; auto measures which is faster at load time (auto)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="save all runs and the summary in FILE, updated after every round",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="keep the runs in the --json file and measure the rest; starts a new file if there "
        "is none",
    )
    group.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write a page with all tables and figures to DIR/index.html, and the figures as SVG "
        "files (needs matplotlib)",
    )
    group.add_argument(
        "--trace-batches",
        type=Path,
        metavar="FILE",
        help="append one JSON line to FILE per llama_decode, including the warm-up: "
        "[[token, position, [sequences], output], ...]",
    )
    group.add_argument(
        "--list-methods", action="store_true", help="list methods and their parameters, then exit"
    )


def _method(text: str) -> Method:
    try:
        return parse_method(load_method_file(text))
    except InvalidParameter as error:  # also a ValueError, whose message argparse would hide
        raise argparse.ArgumentTypeError(str(error)) from None


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"invalid value {text!r}; give on or off")
    return text == "on"


def _positive(text: str) -> int:
    return _at_least(1, text)


def _count(text: str) -> int:
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}; give an integer from {low}")
    return int(text)
