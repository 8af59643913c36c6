"""The JSON that ``--json`` keeps: all that was measured, and on what. One run a line.

The file is whole at every moment: a new one is written beside it and takes its name. So a benchmark
that is killed loses the round that was running and nothing else, and ``--resume`` reads the very
file that everyone else reads. Keys beyond the obvious: a run's ``tokens`` are token ids,
``n_tokens`` is their number; ``complete`` says that nothing was left to measure.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from speculation.bench.results import Curve, Difference, Results, Run, Skipped
from speculation.bench.summary import Row, summarise
from speculation.system.files import obstacle

_WAITS = (0.01, 0.1, 0.5, 2.0)  # seconds between tries


def check_writable(path: Path) -> None:
    """Find out before the hours of measuring, not after. Raises InvalidParameter."""
    reason = obstacle(path)
    if reason:
        raise InvalidParameter(
            f"cannot write --json {path}: {reason}; give the path of a file in a folder that exists"
        )


class JsonFile:
    """The file of ``--json``, renewed as results come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: list[str] = []  # lines made already, so that renewing costs little

    def write(self, results: Results, *, summary: bool = True) -> None:
        """Put ``results`` in the file's place; the summary may wait until the measuring ends.

        Whoever opens the file meanwhile finds the old or the new one, never half of one.
        """
        for run in results.runs[len(self._runs) :]:
            self._runs.append(json.dumps(run_fields(run)))
        path = self.path.resolve()  # where it is a link, what it points to is replaced
        new = path.with_name(path.name + ".new")
        with new.open("w", encoding="utf-8") as file:
            file.write(_text(results, self._runs, summarise(results.runs) if summary else []))
            file.flush()
            os.fsync(file.fileno())
        _put(new, path)


def run_fields(run: Run) -> dict[str, Any]:
    """A run as it stands in the JSON."""
    fields = dataclasses.asdict(run)
    difference = fields.pop("first_difference")
    return {
        **fields,
        "n_tokens": len(run.tokens),
        "same_as_ar": run.same_as_ar,
        "first_difference": difference,
    }


def read_json(path: Path) -> Results:
    """What a file of ``--json`` holds. Raises InvalidParameter where it is none."""
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
            f"cannot read results from {path}: {reason}; give a file that --json wrote, "
            f"in this version of the program"
        ) from error


def _run(fields: Mapping[str, Any]) -> Run:
    known = {field.name for field in dataclasses.fields(Run)}
    values = {name: value for name, value in fields.items() if name in known}
    if values["first_difference"] is not None:
        values["first_difference"] = Difference(**values["first_difference"])
    for name in ("rows_histogram", "tokens_histogram"):  # JSON has no numbers as keys
        values[name] = {int(key): count for key, count in values[name].items()}
    return Run(**values)


def _text(results: Results, runs: Sequence[str], summary: Sequence[Row]) -> str:
    parts = [
        f'"model": {json.dumps(results.model)}',
        f'"device": {json.dumps(results.device)}',
        f'"settings": {json.dumps(results.settings)}',
        f'"started": {json.dumps(results.started)}',
        f'"complete": {json.dumps(results.complete)}',
        f'"runs": {_list(runs)}',
        f'"curves": {_list(_lines(results.curves))}',
        f'"summary": {_list(_lines(summary))}',
        f'"skipped": {_list(_lines(results.skipped))}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _put(new: Path, path: Path) -> None:
    """Have ``new`` take the place of ``path``. On Windows, who reads either holds it up: an editor,
    or a virus scanner for a moment after it was written."""
    for wait in _WAITS:
        with suppress(PermissionError):
            new.replace(path)
            return
        time.sleep(wait)
    new.replace(path)


def _lines(items: Sequence[Any]) -> list[str]:
    return [json.dumps(dataclasses.asdict(item)) for item in items]


def _list(lines: Sequence[str]) -> str:
    """A list with one item a line: short to page through, and a diff shows which run changed."""
    return "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
