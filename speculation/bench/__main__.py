"""``python -m speculation.bench``: loads the model, warms up, measures and reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone

from tqdm import tqdm

from speculation.bench.device import describe_context, describe_device, describe_model
from speculation.bench.json_file import check_writable, write_json
from speculation.bench.options import PROG, Options, parse_options
from speculation.bench.plot import check_plot, write_plot
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import (
    choices,
    differences,
    fastest,
    list_methods,
    skipped_turns,
)
from speculation.bench.results import Curve, Results, Skipped
from speculation.bench.suites import SUITES
from speculation.bench.summary import summarise
from speculation.engine import Engine
from speculation.system.console import INTERRUPTED, OK, run_command


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the benchmark; return the exit code."""
    return run_command(lambda: _bench(parse_options(arguments, prog)), "interrupted")


def _bench(options: Options) -> int:
    if options.list_methods:
        print(list_methods())
        return OK
    suite, plan = SUITES[options.suite], options.plan()
    given = options.read_prompts()
    if options.plot is not None:
        check_plot(options.plot)
    if options.json is not None:
        check_writable(options.json)
    print(f"loading {options.model.model}", file=sys.stderr)
    with options.load() as engine:
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
            _measure(engine, prompts, options, results)
        except KeyboardInterrupt:
            print("interrupted; results so far:", file=sys.stderr)
            code = INTERRUPTED
        finally:  # show the results even after an error
            if results.runs or results.curves:
                _show(engine, options, results)
            print(skipped_turns(results.skipped), end="", flush=True)
    return code


def _measure(engine: Engine, prompts: Sequence[Prompt], options: Options, results: Results) -> None:
    """Add measurements to ``results``, update the ``--json`` file after each round, and show the
    progress: every 30 seconds if stderr is not a terminal."""
    suite, plan = SUITES[options.suite], options.plan()
    live = sys.stderr.isatty()
    with tqdm(
        total=suite.n_measurements(engine, prompts, plan),
        unit="run",
        file=sys.stderr,
        dynamic_ncols=live,
        ascii=not live,
        mininterval=0.1 if live else 30,
    ) as bar:
        for item in suite.measure(engine, prompts, plan):
            if isinstance(item, Skipped):
                results.skipped.append(item)
                bar.total -= plan.repeat * len(plan.methods)
                tqdm.write(f"{item.prompt_id} is skipped: {item.reason}", file=sys.stderr)
            elif isinstance(item, Curve):
                results.curves.append(item)
                bar.set_description_str(f"n_past {item.n_past}", refresh=False)
                bar.update()
            else:
                results.runs += item
                bar.set_description_str(item[0].prompt_id, refresh=False)
                bar.set_postfix_str(fastest(results.runs), refresh=False)
                bar.update(len(item))
            if options.json is not None:
                write_json(options.json, results)
    results.complete = True
    if options.json is not None:
        write_json(options.json, results)


def _show(engine: Engine, options: Options, results: Results) -> None:
    """Print the tables; first draw the picture, because nobody may be reading any more."""
    if options.json is not None:
        print(f"results saved in {options.json}", file=sys.stderr)
    if options.plot is not None:
        write_plot(options.plot, options.suite, results)
        print(f"picture saved in {options.plot}", file=sys.stderr)
    tables = SUITES[options.suite].tables(results)
    for table in [*tables, *choices(summarise(results.runs))]:
        print(f"\n{table.text()}")
    if results.runs:
        print(f"\n{differences(results.runs, engine.model.piece)}")


if __name__ == "__main__":
    sys.exit(main())
