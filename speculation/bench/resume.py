"""--resume: reads an earlier file and checks that it was measured with the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from speculation.bench.json_file import read_json
from speculation.bench.results import Results, Run

# These must be equal. The others follow from them (n_seq_max) or do not matter (os, python).
MODEL = ("file", "n_bytes", "fingerprint", "draft_fingerprint")
DEVICE = ("devices", "cores", "threads", "build")
NOT_SETTINGS = ("n_seq_max",)


def read_earlier(path: Path, *, resume: bool) -> Results | None:
    """The earlier results to continue from, or None to start over.

    Raises InvalidParameter rather than overwrite an unfinished benchmark, or a file that is not a
    benchmark.
    """
    if resume:
        return read_json(path) if path.exists() else None
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        is_complete = read_json(path).complete
    except InvalidParameter:
        raise InvalidParameter(
            f"{path} exists and is not a benchmark of this version, so it is not overwritten; give "
            f"another --json, or delete the file"
        ) from None
    if not is_complete:
        raise InvalidParameter(
            f"{path} is an unfinished benchmark; add --resume to continue it, give another --json, "
            f"or delete the file"
        )
    return None


def require_fit(path: Path, earlier: Results, now: Results) -> None:
    """Raise InvalidParameter if the settings in ``path`` differ from this run's, listing all."""
    settings = [name for name in (*now.settings, *earlier.settings) if name not in NOT_SETTINGS]
    changes = [
        *_changes("model", MODEL, earlier.model, now.model),
        *_changes("device", DEVICE, earlier.device, now.device),
        *_changes("", list(dict.fromkeys(settings)), earlier.settings, now.settings),
    ]
    if changes:
        raise InvalidParameter(
            f"--resume cannot continue {path}, which was measured differently:\n"
            + "\n".join(f"  {line}" for line in changes)
            + "\ngive the same model and settings, or another --json"
        )


def rounds(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    """The runs grouped by prompt and repeat: the rounds that ``run.measure`` need not repeat."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        found.setdefault((run.prompt_id, run.repeat), []).append(run)
    return found


def _changes(
    what: str, names: Sequence[str], earlier: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    for name in names:
        before, after = earlier.get(name), now.get(name)
        if before != after:
            yield f"{what} {name}".strip() + f": was {_show(before)}, is now {_show(after)}"


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
