"""The benchmark from flags to exit code: load, warm up, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batching.errors import SpeculationError
from speculation.bench.device import describe_device, describe_model
from speculation.bench.json_file import check_writable, json_text
from speculation.bench.list_methods import list_methods
from speculation.bench.options import Options, parse_options
from speculation.bench.progress import Progress
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import counted, differences, skipped_turns, tables
from speculation.bench.results import Run, Skipped
from speculation.bench.run import Plan, measure, warm_up
from speculation.bench.summary import summarise
from speculation.engine import Engine, Generation

OK, FAILED, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code. Errors end with one line on stderr."""
    for stream in (sys.stdout, sys.stderr):  # a pipe may be ASCII, and prompts are anything
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    options = parse_options(arguments)
    if options.list_methods:
        print(list_methods())
        return OK
    try:
        return _bench(options)
    except (SpeculationError, OSError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED


def _bench(options: Options) -> int:
    plan, params = options.plan(), options.context_params()
    prompts = options.read_prompts()
    if options.json is not None:
        check_writable(options.json)
    print(f"loading {options.model}", file=sys.stderr)
    with Engine.load(
        options.model,
        params,
        n_gpu_layers=options.gpu_layers,
        trace_batches=options.trace_batches,
    ) as engine:
        print(_heading(engine, plan, prompts), flush=True)
        warm_up(engine, prompts, plan)
        runs: list[Run] = []
        skipped: list[Skipped] = []
        try:
            _measure(engine, prompts, plan, runs, skipped)
        except KeyboardInterrupt:
            print("interrupted; what follows is what was done by then", file=sys.stderr)
            return INTERRUPTED
        finally:  # whatever ended it, what was measured is not lost
            _report(engine, options, plan, runs, skipped)
    return OK


def _measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    plan: Plan,
    runs: list[Run],
    skipped: list[Skipped],
) -> None:
    """Fill ``runs`` and ``skipped`` as they come, so that they outlive an interruption."""
    a_turn = plan.repeat * len(plan.methods)
    with Progress(a_turn * sum(len(prompt.turns) for prompt in prompts)) as progress:

        def on_run(method: str, prompt_id: str, done: Generation) -> None:
            progress.add(method, prompt_id, done.stats.n_tokens, done.stats.decode_seconds)

        for item in measure(engine, prompts, plan, on_run):
            if isinstance(item, Skipped):
                skipped.append(item)
                progress.leave_out(a_turn, f"{item.prompt_id} is skipped: {item.reason}")
            else:
                runs += item


def _report(
    engine: Engine, options: Options, plan: Plan, runs: Sequence[Run], skipped: Sequence[Skipped]
) -> None:
    rows = summarise(runs)
    if runs:
        print(f"\n{tables(rows)}\n\n{differences(runs, engine.model.piece)}")
    if skipped:
        print(skipped_turns(skipped))
    if options.json is not None:
        text = json_text(
            model=describe_model(engine.model),
            device=describe_device(engine),
            settings=_settings(engine, options, plan),
            runs=runs,
            summary=rows,
            skipped=skipped,
        )
        Path(options.json).write_text(text, encoding="utf-8")
        print(f"written to {options.json}")


def _heading(engine: Engine, plan: Plan, prompts: Sequence[Prompt]) -> str:
    context = engine.context
    n_turns = sum(len(prompt.turns) for prompt in prompts)
    return (
        f"{engine.model.path.name}: {engine.model.description}, context {context.n_ctx}, "
        f"KV cache {context.params.kv_type}, flash attention {_on(context.flash_attn)}, "
        f"{counted(context.n_threads, 'thread')}\n"
        f"{counted(len(prompts), 'prompt')} with {counted(n_turns, 'turn')}, "
        f"up to {plan.n_predict} tokens each, {plan.repeat}x {', '.join(map(str, plan.methods))}"
    )


def _settings(engine: Engine, options: Options, plan: Plan) -> dict[str, Any]:
    """What was asked for and, where that leaves a choice, what was chosen."""
    context = engine.context
    return {
        "model": engine.model.path.name,
        "methods": [str(method) for method in plan.methods],
        "prompts": "--prompt" if options.prompt is not None else Path(options.prompts).name,
        "limit": options.limit,
        "categories": options.categories,
        "n_predict": plan.n_predict,
        "raw": plan.raw,
        "repeat": plan.repeat,
        "temperature": options.temperature,
        "seed": options.seed,
        "n_ctx": context.n_ctx,
        "n_batch": context.n_batch,
        "n_seq_max": context.n_seq_max,
        "threads": context.n_threads,
        "gpu_layers": options.gpu_layers,
        "kv_type": context.params.kv_type,
        "flash_attn": _on(context.flash_attn),
    }


def _on(value: bool) -> str:
    return "on" if value else "off"


def _failed(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
