"""Reads and writes the ``--json`` file: all measurements and their settings, one run per line.

Each update writes a new file and renames it, so the file is valid JSON at all times: a benchmark
that is killed loses only the round in progress. Less obvious keys: a run's ``tokens`` are token ids
and ``n_tokens`` is their number; ``complete`` is true once everything is measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from batching.replacing import replacing
from speculation.bench.results import Curve, Difference, Results, Run, Skipped
from speculation.bench.summary import summarise
from speculation.stats import Stats
from speculation.system.files import write_problem

_START = b'{\n"model": '  # of every file that is written here


def check_writable(path: Path) -> None:
    """Check before measuring that the file can be written, and is no file of another kind.

    Raises InvalidParameter.
    """
    reason = write_problem(path)
    if reason:
        raise InvalidParameter(
            f"cannot write --json {path}: {reason}; give the path of a file in a folder that exists"
        )
    if path.exists():
        with path.open("rb") as file:
            start = file.read(len(_START))
        if start not in (b"", _START):
            raise InvalidParameter(
                f"{path} exists and is not a benchmark's JSON, so it is not overwritten; give "
                f"another --json, or delete the file"
            )


def write_json(path: Path, results: Results) -> None:
    """Replace the file atomically with ``results`` and their summary."""
    write_document(
        path,
        {
            "model": results.model,
            "device": results.device,
            "settings": results.settings,
            "started": results.started,
            "complete": results.complete,
        },
        {
            "runs": map(run_fields, results.runs),
            "curves": map(dataclasses.asdict, results.curves),
            "summary": map(dataclasses.asdict, summarise(results.runs)),
            "skipped": map(dataclasses.asdict, results.skipped),
        },
    )


def write_document(
    path: Path, head: Mapping[str, Any], lists: Mapping[str, Iterable[Mapping[str, Any]]]
) -> None:
    """Replace the file atomically with ``head``, which begins with the model, and the ``lists``.

    Each item of a list has a line of its own, so that a diff shows which one changed.
    """
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, items in lists.items():
        lines = ",\n".join(map(json.dumps, items))
        parts.append(f"{json.dumps(name)}: " + (f"[\n{lines}\n]" if lines else "[]"))
    with replacing(path) as file:
        file.write(("{\n" + ",\n".join(parts) + "\n}\n").encode())


def run_fields(run: Run) -> dict[str, Any]:
    """The JSON fields of a run, with those of its stats beside them."""
    stats = dataclasses.replace(  # before Python 3.12, asdict cannot copy a defaultdict
        run.stats,
        rows_histogram=dict(run.stats.rows_histogram),
        tokens_histogram=dict(run.stats.tokens_histogram),
    )
    fields = dataclasses.asdict(dataclasses.replace(run, stats=stats))
    counts, difference = fields.pop("stats"), fields.pop("first_difference")
    return {**fields, **counts, "same_as_ar": difference is None, "first_difference": difference}


def read_json(path: Path) -> Results:
    """The results in a ``--json`` file. Raises InvalidParameter if it cannot be read as one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Results(
            model=dict(document["model"]),
            device=dict(document["device"]),
            settings=dict(document["settings"]),
            started=document["started"],
            runs=[_run(fields) for fields in document["runs"]],
            skipped=[Skipped(**fields) for fields in document["skipped"]],
            curves=[Curve(**fields) for fields in document["curves"]],
            complete=document["complete"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidParameter(
            f"cannot read results from {path}: {reason}; give a file that this version of the "
            f"program wrote with --json"
        ) from error


def _run(fields: Mapping[str, Any]) -> Run:
    difference = fields["first_difference"]
    names = [field.name for field in dataclasses.fields(Stats)]
    stats = {name: fields[name] for name in names if name in fields}
    for histogram in ("rows_histogram", "tokens_histogram"):  # JSON keys are strings
        stats[histogram] = {int(key): count for key, count in stats[histogram].items()}
    return Run(
        method=fields["method"],
        prompt_id=fields["prompt_id"],
        category=fields["category"],
        repeat=fields["repeat"],
        tokens=fields["tokens"],
        finish_reason=fields["finish_reason"],
        stats=Stats(**stats),
        first_difference=None if difference is None else Difference(**difference),
    )
