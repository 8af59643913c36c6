"""The benchmark's flags: the fields of ``Options``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from batching.gguf.reader import fingerprint
from speculation.bench.device import on_or_off
from speculation.bench.prompt_file import BUILTIN, Prompt, read_prompts, select_prompts
from speculation.bench.run import Plan, with_baseline
from speculation.bench.suites import SUITES
from speculation.drafter import Method
from speculation.engine import Engine
from speculation.methods import load_method_file, parse_method
from speculation.registry import heads_for, resolve
from speculation.registry.model_spec import ModelSpec, add_model_flags, at_least
from speculation.sampling import SamplingParams

PROG = "python -m speculation.bench"
DESCRIPTION = """\
Measure the speed-up of speculative decoding methods over plain decoding on this machine.

Every method continues the same prompts and is compared with plain decoding (method ar), which
always runs: how much faster it is, why, and whether the text is the same.
"""
EPILOG = """\
examples
  {prog} --limit 2
      the default methods on two of the built-in prompts of each category
  {prog} --methods prompt-lookup lookahead:window=7,ngram=5 --json result.json
      methods with and without parameters; results saved as JSON
  {prog} --suite cost --plot cost.svg
      what a batch of several tokens costs here, as a picture

suites
  {suites}

docs/bench.md explains prompt files, tables and the JSON file, which is replaced after every round.
Exit code: 0, 2 after an error, 130 after Ctrl-C.
"""


def flag(default: Any, text: str, **keywords: Any) -> Any:
    """A field with the help and the keywords of its flag."""
    if default not in (None, False, (), ""):
        text += f" ({default})"
    return field(default=default, metadata={"help": text, **keywords})


def _method(text: str) -> Method:
    try:
        return parse_method(load_method_file(text))
    except InvalidParameter as error:  # also a ValueError, whose message argparse would hide
        raise argparse.ArgumentTypeError(str(error)) from None


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"invalid value {text!r}; give on or off")
    return text == "on"


_SWITCH, _N = {"action": "store_true"}, {"type": at_least(1), "metavar": "N"}
# The fields of ModelSpec that are flags here.
_MODEL = (
    *("model", "draft_model", "heads", "mtp", "n_ctx", "n_threads", "kv_type", "flash_attn"),
    *("exact", "n_gpu_layers", "n_cpu_moe", "device", "draft_device", "rpc"),
)


@dataclass(frozen=True)
class Options:
    """The flags beside those of ``model``. A suite may have defaults of its own. ``methods``
    includes plain decoding."""

    model: ModelSpec

    suite: str = flag("builtin", "what to measure, see below", choices=tuple(SUITES))
    methods: Sequence[Method] = flag(
        (),
        "methods to compare, name or name:parameter=value,… or FILE.py:SPEC; ar is always included "
        "(auto prompt-lookup)",
        nargs="+",
        type=_method,
        metavar="METHOD",
    )
    list_methods: bool = flag(False, "list methods and their parameters, then exit", **_SWITCH)
    prompts: str = flag(
        BUILTIN,
        "prompts in JSON Lines, or built-in ones: builtin; novel, whose replies repeat little; "
        "memory",
        metavar="FILE|builtin|novel|memory",
    )
    prompt: Sequence[str] = flag(
        (), "a prompt, instead of a file; may be repeated", action="append", metavar="TEXT"
    )
    limit: int | None = flag(
        None, "only the first N prompts of each category, with all turns", **_N
    )
    categories: Sequence[str] | None = flag(
        None, "only prompts of these categories", nargs="+", metavar="NAME"
    )
    n_predict: int = flag(128, "maximum tokens per run", **_N)
    repeat: int = flag(1, "runs of each method on each prompt", **_N)
    temperature: float = flag(0.0, "sampling temperature; 0 is greedy (0)", type=float, metavar="T")
    seed: int = flag(0, "sampling seed, which gives the same text with every method (0)", type=int)
    raw: bool = flag(False, "continue prompts as plain text, without the chat template", **_SWITCH)
    thinking: bool | None = flag(
        None,
        "turn reasoning on or off, if the chat template supports it",
        type=_switch,
        metavar="on|off",
    )
    json: str | None = flag(None, "save all runs and the summary in FILE", metavar="FILE")
    plot: str | None = flag(
        None,
        "draw the results in FILE, as SVG, PNG or PDF; needs matplotlib",
        metavar="FILE",
    )

    def plan(self) -> Plan:
        sampling = SamplingParams(temperature=self.temperature, seed=self.seed)
        return Plan(self.methods, sampling, self.n_predict, self.repeat, self.raw, self.thinking)

    def load(self) -> Engine:
        return Engine.load(self.model.model, self.model.context, **self.model.parts)

    def read_prompts(self) -> list[Prompt]:
        """The prompts asked for. Raises PromptFileError or InvalidParameter."""
        if not self.prompt:
            return select_prompts(read_prompts(self.prompts), self.categories, self.limit)
        if not all(self.prompt):
            raise InvalidParameter("--prompt is empty; give a text")
        texts = enumerate(self.prompt, start=1)
        prompts = [Prompt(f"prompt-{number}", "prompts", (text,)) for number, text in texts]
        return select_prompts(prompts, self.categories, self.limit)

    def settings(self, engine: Engine) -> dict[str, Any]:
        """The settings for the JSON: the flags, with automatic choices resolved and paths reduced
        to names."""
        context, spec = engine.context, self.model
        heads = [resolve(name) for name in heads_for(spec.model, spec.heads)]
        flags = {of.name: getattr(self, of.name) for of in fields(self)}
        for name in ("list_methods", "json", "plot"):
            del flags[name]
        return {
            **flags,
            "model": engine.model.path.name,
            "draft_model": None if engine.draft is None else engine.draft.model.path.name,
            "heads": [f"{path.name} {fingerprint(path)}" for path in heads] or None,
            "mtp": engine.model.n_mtp or None,
            "methods": [str(method) for method in self.methods],
            "prompts": Path(self.prompts).name,
            "ctx": context.n_ctx,
            "kv_type": spec.kv_type,
            "gpu_layers": spec.n_gpu_layers,
            "n_batch": context.n_batch,
            "n_seq_max": context.n_seq_max,
            "threads": context.n_threads,
            "placed_on": [device.description for device in engine.model.devices],
            "flash_attn": on_or_off(context.flash_attn),
            "exact": context.params.n_ubatch if context.params.exact else None,
        }


def parse_options(arguments: Sequence[str] | None = None, prog: str = PROG) -> Options:
    """Read the command line. Exits with code 2 when it is wrong, as argparse does."""
    suites = "\n  ".join(f"{name:8} {suite.title}" for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG.replace("{prog}", prog).replace("{suites}", suites),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own = [of for of in fields(Options) if of.metadata]
    for of in own:
        name = f"--{of.name.replace('_', '-')}"
        parser.add_argument(name, default=argparse.SUPPRESS, **of.metadata)
    add_model_flags(parser, _MODEL)
    flags = parser.parse_args(arguments)
    given = {of.name: getattr(flags, of.name) for of in own if hasattr(flags, of.name)}
    suite = SUITES[given.get("suite", BUILTIN)]
    for name in suite.refused:
        if name in given:
            parser.error(
                f"--suite {suite.name} does not use --{name.replace('_', '-')}; leave it out"
            )
    for one, other in (("prompt", "prompts"), ("raw", "thinking")):
        if one in given and other in given:
            parser.error(f"--{one} and --{other} are both given; drop one")
    given = {**suite.defaults, **given}
    methods = given.get("methods") or [parse_method(name) for name in suite.methods]
    given["methods"] = with_baseline(methods)
    return Options(ModelSpec.of(flags), **given)
