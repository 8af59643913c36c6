"""``python -m speculation.bench``: loads the model, warms up, measures and reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from speculation.bench.device import describe_context, describe_device, describe_model
from speculation.bench.html_report import check_folder, command_line, write_report
from speculation.bench.json_file import check_writable, write_json
from speculation.bench.list_methods import list_methods
from speculation.bench.options import PROG, Options, parse_options
from speculation.bench.plots import require_matplotlib
from speculation.bench.progress import Progress
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import choices, differences, skipped_turns
from speculation.bench.results import Curve, Results, Skipped
from speculation.bench.run import Plan
from speculation.bench.summary import summarise
from speculation.engine import Engine
from speculation.system.console import INTERRUPTED, OK, run_command
from speculation.text import Text


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the benchmark; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_command(
        lambda: _bench(parse_options(given, prog), command_line(given)), "interrupted"
    )


def _bench(options: Options, command: str) -> int:
    if options.list_methods:
        print(list_methods())
        return OK
    suite, plan = options.suite, options.plan()
    given = options.read_prompts()
    if options.report is not None:
        require_matplotlib()
        check_folder(options.report)
    if options.json is not None:
        check_writable(options.json)
    print(f"loading {options.model}", file=sys.stderr)
    with Engine.load(
        options.model,
        options.context_params(),
        draft_model=options.draft_model,
        heads=options.heads,
        mtp=not options.no_mtp,
        n_gpu_layers=options.gpu_layers,
        n_cpu_moe=options.n_cpu_moe,
        device=options.device,
        draft_device=options.draft_device,
        rpc=options.rpc,
    ) as engine:
        prompts = suite.prompts(given, engine, plan)
        results = Results(
            model=describe_model(engine),
            device=describe_device(engine),
            settings=options.settings(engine),
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        notes = suite.notes(engine, prompts, plan)
        print("\n".join([describe_context(engine), *notes]), flush=True)
        code = OK
        try:
            _measure(engine, prompts, plan, options, results)
        except KeyboardInterrupt:
            print("interrupted; results so far:", file=sys.stderr)
            code = INTERRUPTED
        finally:  # show the results even after an error
            _show(engine, options, results, notes, command)
    return code


def _measure(
    engine: Engine, prompts: Sequence[Prompt], plan: Plan, options: Options, results: Results
) -> None:
    """Add measurements to ``results`` and update the ``--json`` file after each round."""
    suite = options.suite
    with Progress(suite.n_measurements(engine, prompts, plan)) as progress:

        def on_run(method: str, prompt_id: str, done: Text) -> None:
            stats = done.stats
            progress.add(method, prompt_id, stats.n_tokens - stats.n_first, stats.decode_seconds)

        for item in suite.measure(engine, prompts, plan, on_run):
            results.add(item)
            if isinstance(item, Skipped):
                n_skipped = plan.repeat * len(plan.methods)
                progress.skip(n_skipped, f"{item.prompt_id} is skipped: {item.reason}")
            elif isinstance(item, Curve):
                progress.advance(f"n_past {item.n_past}")
            if options.json is not None:
                write_json(options.json, results)
        results.complete = True
        if options.json is not None:
            write_json(options.json, results)


def _show(
    engine: Engine, options: Options, results: Results, notes: Sequence[str], command: str
) -> None:
    """Write the report for the results so far and print the tables.

    The report comes first, because nobody may be reading the output any more.
    """
    measured = bool(results.runs or results.curves)
    if measured and options.json is not None:
        print(f"results saved in {options.json}", file=sys.stderr)
    differing = differences(results.runs, engine.model.piece) if results.runs else ""
    if measured and options.report is not None:
        page = write_report(
            options.report,
            options.suite,
            results,
            differences=differing,
            notes=notes,
            command=command,
        )
        print(f"report written to {page}", file=sys.stderr)
    for text in _tables(options, results, differing):
        print(text)
    sys.stdout.flush()


def _tables(options: Options, results: Results, differing: str) -> Iterator[str]:
    tables = options.suite.tables(results) if results.runs or results.curves else []
    for table in [*tables, *choices(summarise(results.runs))]:
        yield f"\n{table.text()}"
    if results.runs:
        yield f"\n{differing}"
    if results.skipped:
        yield skipped_turns(results.skipped)


if __name__ == "__main__":
    sys.exit(main())
