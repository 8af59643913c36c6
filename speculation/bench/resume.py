"""--resume: whether a file holds the beginning of the very measurement that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from speculation.bench.json_file import read_json
from speculation.bench.results import Results, Run

# What has to agree; the rest follows (n_seq_max) or does not touch the figures (os, python).
MODEL = ("file", "n_bytes", "fingerprint", "draft_fingerprint")
DEVICE = ("devices", "cores", "threads", "build")
NOT_SETTINGS = ("n_seq_max",)


def read_earlier(path: Path, *, resume: bool) -> Results | None:
    """What was measured before, to continue from; None to begin anew.

    Raises InvalidParameter where a file would be lost that is unfinished, since hours may be in it,
    or that no benchmark wrote.
    """
    if resume:
        return read_json(path) if path.exists() else None
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        is_complete = read_json(path).complete
    except InvalidParameter:
        raise InvalidParameter(
            f"{path} is there and is no benchmark of this version, so it is not replaced; give "
            f"another --json, or delete the file"
        ) from None
    if not is_complete:
        raise InvalidParameter(
            f"{path} holds an unfinished benchmark; give --resume to go on with it, or another "
            f"--json, or delete the file"
        )
    return None


def require_fit(path: Path, earlier: Results, now: Results) -> None:
    """Raise InvalidParameter naming everything in which ``path`` and this call do not agree."""
    settings = [name for name in (*now.settings, *earlier.settings) if name not in NOT_SETTINGS]
    unlike = [
        *_unlike("model", MODEL, earlier.model, now.model),
        *_unlike("device", DEVICE, earlier.device, now.device),
        *_unlike("", list(dict.fromkeys(settings)), earlier.settings, now.settings),
    ]
    if unlike:
        raise InvalidParameter(
            f"--resume cannot go on with {path}, which was measured otherwise:\n"
            + "\n".join(f"  {line}" for line in unlike)
            + "\ngive the same model and settings as then, or another --json"
        )


def rounds(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    """The runs of each round by prompt and repeat: what ``run.measure`` need not do again."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        found.setdefault((run.prompt_id, run.repeat), []).append(run)
    return found


def _unlike(
    what: str, names: Sequence[str], earlier: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    for name in names:
        before, here = earlier.get(name), now.get(name)
        if before != here:
            yield f"{what} {name}".strip() + f": {_show(before)} there, {_show(here)} here"


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
