"""The steps of a reply, for its bar and its replay: kept, read back, and joined. Pure.

Kept is compressed JSON: ``method``, the names of the ``sources`` of drafts, and for each of the
``steps``

    [draft_ms, decode_ms, accept_ms, n_rows, n_texts, nodes, path, bonus]

as in ``StepRecord``, where each of the ``nodes`` is [parent, piece, number of its source].
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import FiniteFloat, TypeAdapter

from app.worker.messages import StepRecord

MOST_CELLS = 400
MOST_BYTES = 8 * 2**20  # of the JSON, which replays of 10,000 steps stay below
_Ms = FiniteFloat
_Step = tuple[_Ms, _Ms, _Ms, int, int, list[tuple[int, str, int]], list[int], str]


@dataclass(frozen=True)
class _Kept:
    method: str
    sources: list[str]
    steps: list[_Step]


_KEPT = TypeAdapter(_Kept)


def pack(records: Iterable[StepRecord], method: str) -> bytes:
    """What is kept of the steps of a reply by ``method``; empty if they are too many."""
    sources: dict[str, int] = {}
    steps = []
    for record in records:
        nodes = [
            (node.parent, node.piece, sources.setdefault(node.source, len(sources)))
            for node in record.nodes
        ]
        steps.append((*record[:5], nodes, record.path, record.bonus))
    kept = {"method": method, "sources": list(sources), "steps": steps}
    text = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
    return zlib.compress(text) if len(text) <= MOST_BYTES else b""


def shown(kept: bytes) -> bytes:
    """What ``pack`` kept, as JSON. An import may have brought it, so it is read and written anew.

    Raises ValueError if ``pack`` cannot have made it.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(kept, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(error) from error
    if not unpacker.eof:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes, or no end")
    return _KEPT.dump_json(_KEPT.validate_json(text))


def n_tokens(record: StepRecord) -> int:
    """How many tokens a step added to the text, without one that ended it."""
    return len(record.path) + bool(record.bonus)


def milliseconds(record: StepRecord) -> float:
    """How long a step took."""
    return record.draft_ms + record.decode_ms + record.accept_ms


def cells(records: Sequence[StepRecord]) -> list[list[float]]:
    """The bar below a reply: for each step its milliseconds and its tokens.

    Of more than MOST_CELLS steps, as many neighbours as needed are one cell, with their
    milliseconds together and their tokens on average. The first step is left out: most of its time
    may be that of the prompt, whose end it also decodes.
    """
    steps = records[1:]
    n = len(steps)
    n_cells = min(n, MOST_CELLS)
    found: list[list[float]] = []
    for i in range(n_cells):
        joined = steps[i * n // n_cells : (i + 1) * n // n_cells]
        spent = sum(map(milliseconds, joined))
        found.append([round(spent, 3), round(sum(map(n_tokens, joined)) / len(joined), 2)])
    return found
