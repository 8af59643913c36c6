"""The benchmark's command line: flags, help, and checks of their combinations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from batching.gguf.reader import fingerprint
from batching.llama.context import FLASH_ATTN, ContextParams
from speculation.bench.device import on_or_off
from speculation.bench.prompt_file import BUILTIN, Prompt, read_prompts, select_prompts
from speculation.bench.run import Plan, with_baseline
from speculation.bench.suites import SUITES
from speculation.bench.suites.suite import Suite
from speculation.drafter import Method
from speculation.engine import Engine
from speculation.methods import load_method_file, parse_method
from speculation.registry import PAIRED, default_model, heads_for, resolve
from speculation.sampling import SamplingParams

PROG = "python -m speculation.bench"
DEFAULT_METHODS = tuple(SUITES["builtin"].methods)
# Of flags that a suite may refuse or give another default.
DEFAULTS = {
    "prompts": BUILTIN,
    "n_predict": 128,
    "repeat": 1,
    "raw": False,
    "temperature": 0.0,
    "seed": 0,
}

DESCRIPTION = """\
Measure the speed-up of speculative decoding methods over plain decoding on this machine.

Every method continues the same prompts and is compared with plain decoding (method ar), which
always runs: how much faster it is, why, and whether the text is the same.
"""

EPILOG = """\
examples
  {prog} --limit 2
      the default methods on two of the built-in prompts of each category
  {prog} --model qwen2.5-7b-instruct --methods prompt-lookup \\
      "lookahead:window=7,ngram=5,guesses=7" --categories chat edit-code --json result.json
      a model from models.txt, a method with parameters, two categories; results saved as JSON
  {prog} --model story.gguf --raw --prompt "Once upon a time" --repeat 5
      a model without a chat template, one prompt, five runs of each method
  {prog} --suite cost --report report
      what a batch of several tokens costs here, with an HTML report

methods
  A name, or name:parameter=value,parameter=value. Omitted parameters have their defaults.
  FILE.py:SPEC, or FILE.py:SPEC:parameter=value, is a method of your own (examples/README.md).
  --list-methods shows all methods and their parameters. A method may be given several times with
  different parameters.

suites
  {suites}
  scaling has its own methods, and uses the first prompt of each category unless --limit is given.
  cost generates nothing.

prompt files
  JSON Lines, each line one of
    {"prompt": "..."}                                          a single prompt
    {"question_id": 81, "category": "writing", "turns": [...]} a conversation, as in Spec-Bench
  question_id and category may go with "prompt" too. Each turn of a conversation is measured as a
  prompt of its own (named 81, 81#2, 81#3). The replies before a turn are plain decoding's, so that
  all methods continue the same text. With --raw, a conversation is its turns and replies as plain
  text, one per line.
  A prompt that leaves no room for --n-predict tokens in the context is skipped and reported.

the tables, one for each category and one for all
  tokens/s     all generated tokens over all decoding seconds
  speed-up     tokens/s relative to plain decoding on the same prompt (medians over the repeats):
               mean and standard deviation over the prompts
  overall      tokens/s relative to plain decoding, all prompts together
  tokens/step  tokens generated per decode of the model; 1 for plain decoding
  accept       acceptance rate: accepted over drafted tokens
  prefill      time to the first token, ms per run. It includes the first step, which is in no other
               column but tokens/step and accept
  draft, build, decode, verify, commit
               time of each phase, ms per step
  outside      time outside llama.cpp's decode, µs per step
Runs whose text differs from plain decoding are listed with the two tokens and the gap between their
logits. Methods are lossless, but batches of several tokens round differently, so a near-tie can go
the other way. To rule that out, use --kv-type f32 --flash-attn off and an F32 model.

The JSON file is replaced after every round and is always valid. Ctrl-C stops measuring; results so
far are shown and saved. Exit code: 0, 2 after an error, 130 after Ctrl-C.
"""


@dataclass(frozen=True)
class RunOptions:
    """The flags of everything that measures methods on prompts.

    ``prompt``, if given, replaces the file ``prompts``.
    """

    model: str
    methods: list[Method]
    prompts: str
    prompt: list[str] | None
    limit: int | None
    categories: list[str] | None
    n_predict: int
    repeat: int
    raw: bool
    thinking: bool | None
    draft_model: str | None
    heads: list[str]
    ctx: int
    threads: int | None
    gpu_layers: int | None
    kv_type: str
    flash_attn: str
    exact: bool
    json: Path | None

    def context_params(self) -> ContextParams:
        return ContextParams(
            n_ctx=self.ctx,
            n_threads=self.threads,
            kv_type=self.kv_type,
            flash_attn=self.flash_attn,
            exact=self.exact,
        )

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

    def settings(self, engine: Engine) -> dict[str, Any]:
        """The settings for the JSON: the flags, with automatic choices resolved."""
        context = engine.context
        heads = [resolve(name) for name in heads_for(self.model, self.heads)]
        return {
            "model": engine.model.path.name,
            "draft_model": None if engine.draft is None else engine.draft.model.path.name,
            "heads": [f"{path.name} {fingerprint(path)}" for path in heads] or None,
            "mtp": engine.model.n_mtp or None,
            "methods": [str(method) for method in self.methods],
            "prompts": "--prompt" if self.prompt is not None else Path(self.prompts).name,
            "limit": self.limit,
            "categories": self.categories,
            "n_predict": self.n_predict,
            "raw": self.raw,
            "thinking": self.thinking,
            "repeat": self.repeat,
            "n_ctx": context.n_ctx,
            "n_batch": context.n_batch,
            "n_seq_max": context.n_seq_max,
            "threads": context.n_threads,
            "gpu_layers": self.gpu_layers,
            "placed_on": [device.description for device in engine.model.devices],
            "kv_type": context.params.kv_type,
            "flash_attn": on_or_off(context.flash_attn),
            "exact": context.params.n_ubatch if context.params.exact else None,
        }


@dataclass(frozen=True)
class Options(RunOptions):
    """The benchmark's flags. ``methods`` includes plain decoding."""

    suite: Suite
    temperature: float
    seed: int
    no_mtp: bool
    device: str | None
    draft_device: str | None
    rpc: str
    report: Path | None
    list_methods: bool

    def plan(self) -> Plan:
        sampling = SamplingParams(temperature=self.temperature, seed=self.seed)
        return Plan(self.methods, sampling, self.n_predict, self.repeat, self.raw, self.thinking)

    def settings(self, engine: Engine) -> dict[str, Any]:
        return {
            "suite": self.suite.name,
            **super().settings(engine),
            "temperature": self.temperature,
            "seed": self.seed,
        }


def parse_options(arguments: Sequence[str] | None = None, prog: str = PROG) -> Options:
    """Read the command line. Exits with code 2 when it is wrong, as argparse does."""
    parser = _parser(prog)
    values = vars(parser.parse_args(arguments))
    suite = values["suite"] = SUITES[values["suite"]]
    for name in suite.refused:
        if values[name] is not None:
            flag = name.replace("_", "-")
            parser.error(f"--suite {suite.name} does not use --{flag}; leave it out")
    complete(parser, values, suite.methods, {**DEFAULTS, **suite.defaults})
    values["methods"] = with_baseline(values["methods"])
    return Options(**values)


def complete(
    parser: argparse.ArgumentParser,
    values: dict[str, Any],
    methods: Sequence[str],
    defaults: Mapping[str, Any] = DEFAULTS,
) -> None:
    """Set what is not given in ``values``: the methods, and the ``defaults`` by name."""
    if values["raw"] and values["thinking"] is not None:
        parser.error("--thinking needs the chat template, and --raw does not use it; drop one")
    if values["methods"] is None:
        values["methods"] = [parse_method(name) for name in methods]
    values["heads"] = [PAIRED] if values["heads"] == [] else values["heads"] or []
    for name, default in defaults.items():
        if values.get(name, default) is None:
            values[name] = default


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG.replace("{prog}", prog).replace(
            "{suites}", "\n  ".join(f"{name:8} {suite.title}" for name, suite in SUITES.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--suite",
        choices=tuple(SUITES),
        default="builtin",
        help="what to measure, see below (builtin)",
    )
    add_runs(group, f"methods to compare; ar is always included ({' '.join(DEFAULT_METHODS)})")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy (0)"
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="sampling seed; a seed gives the same text with every method (0)",
    )
    add_prompts(parser.add_argument_group("prompts"))
    group = parser.add_argument_group("model and context")
    add_model(group)
    _add_machine(group)
    group = parser.add_argument_group("output")
    add_json(group)
    group.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write a page with all tables and figures to DIR/index.html, and the figures as SVG "
        "files (needs matplotlib)",
    )
    group.add_argument(
        "--list-methods", action="store_true", help="list methods and their parameters, then exit"
    )
    return parser


def add_runs(group: argparse._ActionsContainer, methods: str) -> None:
    """The flags for what runs how often. ``methods`` is the help of ``--methods``."""
    group.add_argument("--methods", nargs="+", type=_method, metavar="METHOD", help=methods)
    group.add_argument(
        "--n-predict",
        type=_positive,
        metavar="N",
        help="maximum tokens per run (128; 256 in the suite memory)",
    )
    group.add_argument(
        "--repeat", type=_positive, metavar="R", help="runs of each method on each prompt (1)"
    )


def add_json(group: argparse._ActionsContainer) -> None:
    """The flag for the JSON file."""
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="save all runs and the summary in FILE"
    )


def add_prompts(group: argparse._ActionsContainer) -> None:
    """The flags for the prompts."""
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


def add_model(group: argparse._ActionsContainer) -> None:
    """The flags for the model and its context."""
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
        "--ctx",
        type=int,
        default=0,
        metavar="N",
        help="context size in tokens; 0 = the model's own, as far as memory allows (0)",
    )
    group.add_argument(
        "--threads", type=_positive, metavar="N", help="CPU threads (one per physical core)"
    )
    group.add_argument(
        "--gpu-layers", type=_count, metavar="N", help="layers on the GPU, if any (all that fit)"
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
    group.add_argument(
        "--exact",
        action="store_true",
        help="every text is the very same as plain decoding's (docs/lossless.md)",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-mtp",
        action="store_true",
        help="do not load the model's own multi-token prediction layers",
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
