"""``python -m speculation.bench``: loads the model, warms up, measures and reports."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter, SpeculationError
from batching.gguf.reader import fingerprint
from speculation.bench.device import describe_device, describe_model
from speculation.bench.html_report import check_folder, command_line, write_report
from speculation.bench.json_file import JsonFile, check_writable
from speculation.bench.list_methods import list_methods
from speculation.bench.options import Options, parse_options
from speculation.bench.plots import require_matplotlib
from speculation.bench.progress import Progress
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import choices, counted, differences, positions, skipped_turns
from speculation.bench.results import Curve, Results, Skipped
from speculation.bench.resume import read_earlier, require_fit
from speculation.bench.run import Plan
from speculation.bench.summary import summarise
from speculation.engine import Engine
from speculation.registry import heads_for, resolve
from speculation.system.console import replace_unencodable, worded
from speculation.text import Text

OK, FAILED, INTERRUPTED = 0, 2, 130
COMPARE = "tools.compare"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code. Errors end with one line on stderr."""
    replace_unencodable()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_options(arguments)
    if options.list_methods:
        print(list_methods())
        return OK
    try:
        if options.compare_llama_cpp is not None:
            return _compare(arguments)
        return _bench(options, command_line(arguments))
    except BrokenPipeError:  # the reader has gone; keep Python from flushing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (SpeculationError, OSError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED


def _compare(arguments: Sequence[str]) -> int:
    """Run ``tools.compare``, which is in the repository but not in the package."""
    try:
        found = find_spec(COMPARE)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise InvalidParameter(
            "--compare-llama-cpp needs the project's tools, which the package does not include; "
            "run it from a checkout of the repository"
        )
    return subprocess.call([sys.executable, "-m", COMPARE, *arguments])


def _bench(options: Options, command: str) -> int:
    suite, plan, params = options.suite, options.plan(), options.context_params()
    given = options.read_prompts()
    if options.report is not None:
        require_matplotlib()
        check_folder(options.report)
    earlier = None
    if options.json is not None:
        check_writable(options.json)
        earlier = read_earlier(options.json, resume=options.resume)
    if earlier is not None and options.flash_attn == "auto":  # keep what auto chose at the time
        chosen = earlier.settings.get("flash_attn", "auto")
        params = dataclasses.replace(params, flash_attn=chosen)
    print(f"loading {options.model}", file=sys.stderr)
    with Engine.load(
        options.model,
        params,
        draft_model=options.draft_model,
        heads=options.heads,
        mtp=not options.no_mtp,
        n_gpu_layers=options.gpu_layers,
        device=options.device,
        draft_device=options.draft_device,
        rpc=options.rpc,
        memory=options.memory,
        trace_batches=options.trace_batches,
    ) as engine:
        prompts = suite.prompts(given, engine, plan)
        results = _empty_results(engine, options, plan, prompts)
        if earlier is not None and options.json is not None:
            require_fit(options.json, earlier, results)
            results = earlier
        notes = suite.notes(engine, plan)
        print("\n".join([_heading(engine, suite.what(prompts, plan)), *notes]), flush=True)
        if results.complete:
            print(f"{options.json} is complete; nothing is left to measure", file=sys.stderr)
            return _show(engine, options, results, notes, command)
        suite.warm_up(engine, prompts, plan)
        code = OK
        try:
            _measure(engine, prompts, plan, options, results)
        except KeyboardInterrupt:
            print("interrupted; results so far:", file=sys.stderr)
            code = INTERRUPTED
        finally:  # show the results even after an error
            code = _show(engine, options, results, notes, command) or code
    return code


def _empty_results(
    engine: Engine, options: Options, plan: Plan, prompts: Sequence[Prompt]
) -> Results:
    """Empty results, with the model, the device and the settings."""
    return Results(
        model=describe_model(engine.model, None if engine.draft is None else engine.draft.model),
        device=describe_device(engine),
        settings=_settings(engine, options, plan, prompts),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _measure(
    engine: Engine, prompts: Sequence[Prompt], plan: Plan, options: Options, results: Results
) -> None:
    """Add measurements to ``results`` and update the ``--json`` file after each round."""
    suite = options.suite
    file = JsonFile(options.json) if options.json is not None else None
    results.skipped.clear()  # measuring reports them again
    n_all = suite.n_measurements(engine, prompts, plan)
    with Progress(n_all, len(results.curves), results.runs) as progress:

        def on_run(method: str, prompt_id: str, done: Text) -> None:
            stats = done.stats
            n_timed = stats.n_tokens - stats.n_first
            progress.add(method, prompt_id, n_timed, stats.decode_seconds)

        try:
            for item in suite.measure(engine, prompts, plan, results, on_run):
                results.add(item)
                if isinstance(item, Skipped):
                    n_skipped = plan.repeat * len(plan.methods)
                    progress.skip(n_skipped, f"{item.prompt_id} is skipped: {item.reason}")
                elif isinstance(item, Curve):
                    progress.advance(f"n_past {item.n_past}")
                if file is not None:
                    file.write(results, summary=False)
            results.complete = True
        finally:
            if file is not None and (results.complete or results.runs or results.curves):
                file.write(results)


def _show(
    engine: Engine, options: Options, results: Results, notes: Sequence[str], command: str
) -> int:
    """Print the tables and write the report for the results so far; return the exit code."""
    is_saved = options.json is not None and options.json.exists()
    try:
        differing = differences(results.runs, engine.model.piece) if results.runs else ""
        try:
            for text in _tables(options, results, differing):
                print(text)
            if is_saved:
                print(f"written to {options.json}")
            sys.stdout.flush()
        finally:  # also after a broken pipe
            if options.report is not None and (results.runs or results.curves):
                page = write_report(
                    options.report,
                    options.suite,
                    results,
                    differences=differing,
                    notes=notes,
                    command=command,
                )
                print(f"report written to {page}")
    except KeyboardInterrupt:
        where = "use --json FILE to save them"
        if is_saved:
            where = f"they are saved in {options.json}; add --resume to show them again"
        print(f"interrupted while showing the results; {where}", file=sys.stderr)
        return INTERRUPTED
    return OK


def _tables(options: Options, results: Results, differing: str) -> Iterator[str]:
    if results.runs or results.curves:
        yield f"\n{options.suite.text(results)}"
    if results.runs:
        rows = summarise(results.runs)
        for table in [*positions(rows)[-1:], *choices(rows)]:
            yield f"\n{table.text()}"
        yield f"\n{differing}"
    if results.skipped:
        yield skipped_turns(results.skipped)


def _heading(engine: Engine, what: str) -> str:
    context = engine.context
    return (
        f"{engine.model.path.name}: {engine.model.description}, context {context.n_ctx}, "
        f"KV cache {context.params.kv_type}, flash attention {_on(context.flash_attn)}, "
        f"{counted(context.n_threads, 'thread')}\n"
        f"{', '.join(describe_device(engine)['devices'])}\n{what}"
    )


def _settings(
    engine: Engine, options: Options, plan: Plan, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The settings for the JSON: the flags, with automatic choices resolved."""
    context = engine.context
    heads = [resolve(name) for name in heads_for(options.model, options.heads)]
    return {
        "model": engine.model.path.name,
        "draft_model": None if engine.draft is None else engine.draft.model.path.name,
        "heads": [f"{path.name} {fingerprint(path)}" for path in heads] or None,
        "mtp": engine.model.n_mtp or None,
        "memory": None if options.memory is None else options.memory.name,
        "suite": options.suite.name,
        "methods": [str(method) for method in plan.methods],
        "prompts": "--prompt" if options.prompt is not None else Path(options.prompts).name,
        "prompts_hash": _prompts_hash(prompts),
        "limit": options.limit,
        "categories": options.categories,
        "n_predict": plan.n_predict,
        "raw": plan.raw,
        "thinking": plan.thinking,
        "repeat": plan.repeat,
        "temperature": options.temperature,
        "seed": options.seed,
        "n_ctx": context.n_ctx,
        "n_batch": context.n_batch,
        "n_seq_max": context.n_seq_max,
        "threads": context.n_threads,
        "gpu_layers": options.gpu_layers,
        "placed_on": [device.description for device in engine.model.devices],
        "kv_type": context.params.kv_type,
        "flash_attn": _on(context.flash_attn),
    }


def _prompts_hash(prompts: Sequence[Prompt]) -> str:
    """The first 16 hex digits of the prompts' SHA-256."""
    text = json.dumps([dataclasses.astuple(prompt) for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _on(value: bool) -> str:
    return "on" if value else "off"


def _failed(error: Exception) -> int:
    print(f"error: {worded(error)}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
