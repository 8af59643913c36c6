"""Reads and writes the ``--json`` file: all measurements and their settings, one run per line.

Each update writes a new file and renames it, so the file is valid JSON at all times: a benchmark
that is killed loses only the round in progress, and ``--resume`` continues from the file. Less
obvious keys: a run's ``tokens`` are token ids and ``n_tokens`` is their number; ``complete`` is
true once everything is measured.
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

_WAITS = (0.01, 0.1, 0.5, 2.0)  # seconds between attempts


def check_writable(path: Path) -> None:
    """Check before measuring that the file can be written. Raises InvalidParameter."""
    reason = obstacle(path)
    if reason:
        raise InvalidParameter(
            f"cannot write --json {path}: {reason}; give the path of a file in a folder that exists"
        )


class JsonFile:
    """The ``--json`` file, rewritten as results come in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: list[str] = []  # runs already encoded, so that rewriting is cheap

    def write(self, results: Results, *, summary: bool = True) -> None:
        """Replace the file atomically with ``results``, with or without the summary."""
        for run in results.runs[len(self._runs) :]:
            self._runs.append(json.dumps(run_fields(run)))
        path = self.path.resolve()  # replace what a link points to, not the link
        new = path.with_name(path.name + ".new")
        with new.open("w", encoding="utf-8") as file:
            file.write(_text(results, self._runs, summarise(results.runs) if summary else []))
            file.flush()
            os.fsync(file.fileno())
        _replace(new, path)


def run_fields(run: Run) -> dict[str, Any]:
    """The JSON fields of a run."""
    fields = dataclasses.asdict(run)
    difference = fields.pop("first_difference")
    return {
        **fields,
        "n_tokens": len(run.tokens),
        "same_as_ar": run.same_as_ar,
        "first_difference": difference,
    }


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
    known = {field.name for field in dataclasses.fields(Run)}
    values = {name: value for name, value in fields.items() if name in known}
    if values["first_difference"] is not None:
        values["first_difference"] = Difference(**values["first_difference"])
    for name in ("rows_histogram", "tokens_histogram"):  # JSON keys are strings
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


def _replace(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``. Retries, because on Windows any open reader blocks the rename: an
    editor, or a virus scanner right after a write."""
    for wait in _WAITS:
        with suppress(PermissionError):
            new.replace(path)
            return
        time.sleep(wait)
    new.replace(path)


def _lines(items: Sequence[Any]) -> list[str]:
    return [json.dumps(dataclasses.asdict(item)) for item in items]


def _list(lines: Sequence[str]) -> str:
    """A JSON list with one item per line, so that a diff shows which run changed."""
    return "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
