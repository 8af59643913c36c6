"""Writes the ``--json`` file: all measurements and their settings, one run per line.

Each update writes a new file and renames it, so the file is valid JSON at all times: a benchmark
that is killed loses only the round in progress. Less obvious keys: a run's ``tokens`` are token ids
and ``n_tokens`` is their number; ``complete`` is true once everything is measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from batching.replacing import replacing
from speculation.bench.results import Results, Run
from speculation.bench.summary import summarise
from speculation.system.files import require_writable

_START = b'{\n"model": '  # of every file that is written here


def check_writable(file: str) -> None:
    """Check before measuring that the file can be written, and is no file of another kind.

    Raises InvalidParameter.
    """
    path = Path(file)
    require_writable(path)
    if path.exists() and path.read_bytes()[: len(_START)] not in (b"", _START):
        raise InvalidParameter(
            f"{path} exists and is not a benchmark's JSON, so it is not overwritten; give another "
            f"--json, or delete the file"
        )


def write_json(path: str, results: Results) -> None:
    """Replace the file atomically with ``results`` and their summary."""
    parts = [
        f'"{name}": {json.dumps(getattr(results, name))}'
        for name in ("model", "device", "settings", "started", "complete")
    ]
    for name, items in (
        ("runs", map(_fields, results.runs)),
        ("curves", map(dataclasses.asdict, results.curves)),
        ("summary", map(dataclasses.asdict, summarise(results.runs))),
        ("skipped", map(dataclasses.asdict, results.skipped)),
    ):
        lines = ",\n".join(map(json.dumps, items))  # a diff shows which one changed
        parts.append(f'"{name}": ' + (f"[\n{lines}\n]" if lines else "[]"))
    with replacing(Path(path)) as file:
        file.write(("{\n" + ",\n".join(parts) + "\n}\n").encode())


def _fields(run: Run) -> dict[str, Any]:
    """The JSON fields of a run, with those of its stats beside them."""
    stats = dataclasses.replace(  # before Python 3.12, asdict cannot copy a defaultdict
        run.stats,
        rows_histogram=dict(run.stats.rows_histogram),
        tokens_histogram=dict(run.stats.tokens_histogram),
    )
    fields = dataclasses.asdict(dataclasses.replace(run, stats=stats))
    counts, difference = fields.pop("stats"), fields.pop("first_difference")
    return {**fields, **counts, "same_as_ar": difference is None, "first_difference": difference}
