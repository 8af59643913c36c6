"""Files of training data, the command that trains on them, and states without a model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speculation.train.__main__ import main
from speculation.train.states import States, begin, write_samples
from speculation.train.texts import Sample


def lines(path: Path, *objects: object) -> Path:
    text = "".join(json.dumps(item) + "\n" for item in objects)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def train(kind: str, model: Path, data: Path, out: Path, *flags: object) -> int:
    """Run a command that trains, on one thread; return its exit code."""
    files = ["--model", model, "--data", data, "--out", out, "--threads", 1]
    return main([kind, *map(str, files), *map(str, flags)])


def collected(
    folder: Path,
    samples: Sequence[Sample],
    hidden: npt.ArrayLike = (0, 0, 0, 0),
    choices: Sequence[int] | None = None,
) -> States:
    """States over ``samples``: hidden ones, (n, n_embd) or for all the same, and choices, (n,)."""
    begin(folder, {})
    write_samples(folder, samples, 2**20)
    n = sum(len(sample.ids) for sample in samples)
    rows = np.array(np.broadcast_to(hidden, (n, np.shape(hidden)[-1])), np.float16)
    np.save(folder / "hidden.npy", rows)
    np.save(folder / "choices.npy", np.array(choices or [0] * n, np.int32))
    return States(folder)
