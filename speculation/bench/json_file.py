"""Writes the ``--json`` file: all measurements and their settings, one run per line.

Each update writes a new file and renames it, so the file is valid JSON at all times: a benchmark
that is killed loses only the round in progress. Less obvious keys: a run's ``tokens`` are token ids
and ``n_tokens`` is their number; ``complete`` is true once everything is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import to_builtins

from batching.errors import InvalidParameter
from batching.replacing import replacing
from speculation.bench.results import Results
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
    found = to_builtins(results)
    for run in found["runs"]:
        run.update(run.pop("stats"), same_as_ar=run["first_difference"] is None)
    lists = {
        "runs": found["runs"],
        "curves": found["curves"],
        "summary": to_builtins(summarise(results.runs)),
        "skipped": found["skipped"],
    }
    names = ("model", "device", "settings", "started", "complete")
    parts = [f'"{name}": {json.dumps(found[name])}' for name in names]
    for name, items in lists.items():
        lines = ",\n".join(map(json.dumps, items))  # a diff shows which one changed
        parts.append(f'"{name}": ' + (f"[\n{lines}\n]" if lines else "[]"))
    with replacing(Path(path)) as file:
        file.write(("{\n" + ",\n".join(parts) + "\n}\n").encode())
