"""Recordings: the texts of one model with all that a policy's result depends on.

A file is gzipped JSON Lines: a header, then one line a text.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter

VERSION = 2
Successors = list[tuple[int, float]]  # token, log-probability; likeliest first
Draft = list[tuple[int, int, float]]  # parent (-1 = the root), token, q; parents first


@dataclass
class Header:
    """What holds for all texts of a file.

    model          its file name
    n_vocab        tokens in its vocabulary
    cost           its measured cost: ``near`` and ``far`` in the context, row counts and seconds
    draft_seconds  time of a decode of the draft model with 1, 2, … rows; empty = none was loaded
    """

    model: str
    n_vocab: int
    cost: dict[str, Any]
    draft_seconds: list[float] = field(default_factory=list)
    version: int = VERSION


@dataclass
class Recorded:
    """A prompt and the model's reply.

    successors  the likeliest tokens after the prompt and after each token of the reply but the last
    drafts      the draft model's tree at the same places; empty without a draft model
    """

    id: str
    category: str
    prompt: list[int]
    reply: list[int]
    successors: list[Successors] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)


def write(path: Path, header: Header, texts: Sequence[Recorded]) -> None:
    """Write a recording. Raises OSError."""
    lines = [asdict(header), *map(asdict, texts)]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> tuple[Header, list[Recorded]]:
    """Read a recording. Raises InvalidParameter for anything else."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = _lines(file)
            header = Header(**next(lines))
            if header.version != VERSION:
                raise InvalidParameter(f"{path} has version {header.version}; record it anew")
            return header, [Recorded(**line) for line in lines]
    except (OSError, ValueError, TypeError, StopIteration, EOFError) as error:
        raise InvalidParameter(f"{path} is not a recording: {error}; record it anew") from error


def _lines(file: Any) -> Iterator[dict[str, Any]]:
    for line in file:
        yield json.loads(line)
