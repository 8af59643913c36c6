"""The target's hidden states and choices while it reads, in memory-mapped files.

A folder holds one collection. It can be stopped at any time and goes on where it was:

    run.json       what it is made of: target, data, options
    samples.jsonl  the token ids of each piece, and what of it the target wrote: a line for each
    tokens.npy     (n,) int32: all pieces, one after the other
    ends.npy       (n_pieces,) int64: where each ends
    until.npy      (n,) int64: where the part that a token belongs to ends, if it is to be learnt
                   from; else 0
    hidden.npy     (n, n_embd) float16: the state after the final norm at each token
    layers.npy     (n, n_layers * n_embd) float16: what went into some layers, for heads that read
                   that
    choices.npy    (n,) int32: what the target would say next, greedily
    done           how many pieces are read
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.llama.context import Context
from batching.rows import text_rows
from speculation.train import TrainError
from speculation.train.texts import Piece

CHUNK = 128  # rows of a decode: each has a row of logits, which a large vocabulary makes dear
_KEEP_EVERY = 50  # pieces after which what was read is safe


class States:
    """A finished collection, mapped into memory.

    tokens, choices  (n,)
    hidden           (n, n_embd)
    layers           (n, n_layers * n_embd), or None where that was not collected
    ends             (n_pieces,)
    until            (n,)
    """

    def __init__(self, folder: Path) -> None:
        self.tokens: npt.NDArray[np.int32] = np.load(folder / "tokens.npy", mmap_mode="r")
        self.ends: npt.NDArray[np.int64] = np.load(folder / "ends.npy")
        self.until: npt.NDArray[np.int64] = np.load(folder / "until.npy")
        self.hidden: npt.NDArray[np.float16] = np.load(folder / "hidden.npy", mmap_mode="r")
        file = folder / "layers.npy"
        self.layers: npt.NDArray[np.float16] | None = (
            np.load(file, mmap_mode="r") if file.exists() else None
        )
        self.choices: npt.NDArray[np.int32] = np.load(folder / "choices.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.tokens)


def begin(folder: Path, run: Mapping[str, Any]) -> None:
    """Make the folder for a collection, or check that it holds the beginning of this one.

    A folder whose samples have no tokens holds nothing, and is begun anew. Raises TrainError naming
    what differs, and for a folder with files of something else: none of them is touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.json"
    if file.exists():
        try:
            earlier = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise TrainError(
                f"{file} does not say what was collected ({error}); give another --work, or remove "
                f"that folder"
            ) from None
        is_ours = not earlier.keys().isdisjoint(run)
    else:
        is_ours = all(path.suffix == ".partial" for path in folder.iterdir())
    if not is_ours:
        raise TrainError(
            f"{folder} has files and is no folder of collected states; give a --work that is empty "
            f"or not there yet"
        )
    if not file.exists() or not _has_tokens(folder):
        (folder / "samples.jsonl").unlink(missing_ok=True)
        _put(file, json.dumps(run, indent=1).encode())
        return
    for key in (*run, *earlier):
        if run.get(key) != earlier.get(key):
            raise TrainError(
                f"{folder} holds states collected otherwise: {key} was {earlier.get(key)!r} and is "
                f"{run.get(key)!r}; give another --work, or remove that folder"
            )


def _has_tokens(folder: Path) -> bool:
    return n_samples(folder) > 0 and any(
        piece.ids for piece in _read_samples(folder / "samples.jsonl")
    )


def n_samples(folder: Path) -> int:
    """Samples that were written before; what a line lacks that was cut short is dropped."""
    file = folder / "samples.jsonl"
    if not file.exists():
        return 0
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.write_bytes(whole)
    return whole.count(b"\n")


def write_samples(
    folder: Path,
    samples: Iterable[Piece],
    max_tokens: int,
    progress: Callable[[int, int], None],
) -> None:
    """Append samples, which follow those written before, until there are ``max_tokens`` in all.

    ``progress(n_tokens, max_tokens)`` is called after each. Raises TrainError when there are none.
    """
    if (folder / "ends.npy").exists():
        return
    n_before = n_samples(folder)
    file = folder / "samples.jsonl"
    n_tokens = sum(len(piece.ids) for piece in _read_samples(file)) if n_before else 0
    with file.open("a", encoding="utf-8") as lines:
        for piece in samples:
            if n_tokens >= max_tokens:
                break
            piece = piece.cut(0, max_tokens - n_tokens)
            lines.write(json.dumps(asdict(piece), separators=(",", ":")) + "\n")
            lines.flush()
            n_tokens += len(piece.ids)
            progress(n_tokens, max_tokens)
    if n_tokens == 0:
        raise TrainError("there is no text in the data; give files that have some")
    pieces = list(_read_samples(file))
    ends = np.cumsum([len(piece.ids) for piece in pieces], dtype=np.int64)
    tokens = np.concatenate([piece.ids for piece in pieces]).astype(np.int32)
    # The last one says that all are there.
    for name, values in (("tokens", tokens), ("until", _until(pieces)), ("ends", ends)):
        content = io.BytesIO()
        np.save(content, values)
        _put(folder / f"{name}.npy", content.getvalue())


def _until(pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
    found = np.zeros(sum(len(piece.ids) for piece in pieces), np.int64)
    first = 0
    for piece in pieces:
        spans = [(0, len(piece.ids))] if piece.spans is None else piece.spans
        for start, end in spans:
            found[first + start : first + end] = first + end
        first += len(piece.ids)
    return found


def collect(
    folder: Path,
    context: Context,
    progress: Callable[[int, int], None],
    layers: Sequence[int] = (),
) -> States:
    """Read the samples and keep a state and a choice for every token; go on where it was.

    ``progress(n_tokens, n_all)`` is called after each piece. What goes into ``layers`` is kept as
    well. Raises TrainError when the disk has no room, UnsupportedModel where llama.cpp does not
    give that out.
    """
    tokens = np.load(folder / "tokens.npy")
    ends = np.load(folder / "ends.npy")
    done_file = folder / "done"
    done = int(done_file.read_text()) if done_file.exists() else 0
    n_embd = context.model.n_embd_out
    n_left = len(tokens) - (int(ends[done - 1]) if done else 0)
    _check_room(folder, n_left * (2 * n_embd * (1 + len(layers)) + 4))  # no room would be SIGBUS
    hidden = _mapped(folder / "hidden.npy", np.float16, (len(tokens), n_embd))
    choices = _mapped(folder / "choices.npy", np.int32, (len(tokens),))
    width = len(layers) * context.model.n_embd
    inner = _mapped(folder / "layers.npy", np.float16, (len(tokens), width)) if layers else None

    step = min(CHUNK, context.n_batch)  # a small context has a small batch

    def keep(n_pieces: int) -> None:
        hidden.flush()
        choices.flush()
        if inner is not None:
            inner.flush()
        _put(done_file, str(n_pieces).encode())

    context.want_hidden(True)
    context.want_layers(layers)
    try:
        for piece in range(done, len(ends)):
            start = int(ends[piece - 1]) if piece else 0
            end = int(ends[piece])
            context.seq_rm(-1, 0, -1)
            for first in range(start, end, step):
                chunk = tokens[first : min(first + step, end)].tolist()
                output = context.decode(text_rows(chunk, first - start, [True] * len(chunk)))
                for row in range(len(chunk)):
                    hidden[first + row] = output.hidden(row)
                    choices[first + row] = output.argmax(row)
                    if inner is not None:
                        inner[first + row] = output.aux_hidden_states(row, layers)
            progress(end, len(tokens))
            if (piece + 1) % _KEEP_EVERY == 0:
                keep(piece + 1)
    finally:
        context.want_hidden(False)
        context.want_layers(())
        context.seq_rm(-1, 0, -1)
    keep(len(ends))
    return States(folder)


def _put(file: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def _read_samples(file: Path) -> Iterable[Piece]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield Piece(**json.loads(line))


def _mapped(file: Path, kind: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    if file.exists():
        found: np.memmap[Any, Any] = np.load(file, mmap_mode="r+")
        return found
    made: np.memmap[Any, Any] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        file, mode="w+", dtype=kind, shape=shape
    )
    return made


def _check_room(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise TrainError(
            f"the states take {n_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free in "
            f"{folder}; lower --max-tokens, or give a --work on another disk"
        )
