"""The JSON that ``--json`` writes: all that was measured, and on what. One run a line.

Keys beyond the obvious: a run's ``tokens`` are token ids, ``n_tokens`` is their number.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from speculation.bench.results import Run, Skipped
from speculation.bench.summary import Row


def check_writable(path: Path) -> None:
    """Find out before the hours of measuring, not after. Raises InvalidParameter."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidParameter(
            f"cannot write --json {path}: {'it is a folder' if path.is_dir() else 'no such folder'}"
            f"; give the path of a file in a folder that exists"
        )


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


def json_text(
    *,
    model: Mapping[str, Any],
    device: Mapping[str, Any],
    settings: Mapping[str, Any],
    runs: Sequence[Run],
    summary: Sequence[Row],
    skipped: Sequence[Skipped],
) -> str:
    """The whole document."""
    parts = [
        f'"model": {json.dumps(model)}',
        f'"device": {json.dumps(device)}',
        f'"settings": {json.dumps(settings)}',
        f'"runs": {_lines([run_fields(run) for run in runs])}',
        f'"summary": {_lines([dataclasses.asdict(row) for row in summary])}',
        f'"skipped": {_lines([dataclasses.asdict(turn) for turn in skipped])}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(items: Sequence[Mapping[str, Any]]) -> str:
    """A list with one item a line: short to page through, and a diff shows which run changed."""
    if not items:
        return "[]"
    return "[\n" + ",\n".join(json.dumps(item) for item in items) + "\n]"
