"""Collects the target's hidden states and greedy choices over the training data, in mapped files.

One folder holds one collection. Collecting can stop at any time and resumes where it stopped:

    run.json       target, data and options of the collection
    samples.jsonl  token ids and generated spans of each sequence, one sequence per line
    tokens.npy     (n,) int32: the tokens of all sequences, concatenated
    ends.npy       (n_sequences,) int64: end of each sequence
    until.npy      (n,) int64: end of the token's span if it is trained on, else 0
    hidden.npy     (n, n_embd) float16: hidden state after the final norm
    layers.npy     (n, n_layers * n_embd) float16: auxiliary hidden states, the inputs of some
                   layers, for heads that read them
    choices.npy    (n,) int32: the target's greedy choice after each token
    done           number of sequences read so far
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
from speculation.train.texts import Sample

CHUNK = 128  # rows per decode; each has a row of logits, large with a large vocabulary
_FLUSH_EVERY = 50  # sequences


class States:
    """A finished collection, mapped into memory. The module's docstring describes the arrays.

    tokens, choices  (n,)
    hidden           (n, n_embd)
    layers           (n, n_layers * n_embd), or None if not collected
    ends             (n_sequences,)
    span_end         (n,), from until.npy
    """

    def __init__(self, folder: Path) -> None:
        self.tokens: npt.NDArray[np.int32] = np.load(folder / "tokens.npy", mmap_mode="r")
        self.ends: npt.NDArray[np.int64] = np.load(folder / "ends.npy")
        self.span_end: npt.NDArray[np.int64] = np.load(folder / "until.npy")
        self.hidden: npt.NDArray[np.float16] = np.load(folder / "hidden.npy", mmap_mode="r")
        file = folder / "layers.npy"
        self.layers: npt.NDArray[np.float16] | None = (
            np.load(file, mmap_mode="r") if file.exists() else None
        )
        self.choices: npt.NDArray[np.int32] = np.load(folder / "choices.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.tokens)


def begin(folder: Path, run: Mapping[str, Any]) -> tuple[int, ...]:
    """Create the folder of a collection, or check that it belongs to an earlier run of this one.

    Returns the layers whose inputs it has: one with layers serves a run without, too. A folder
    without a single token is started over. Raises TrainError if an option differs, naming
    it, or if the folder has unrelated files; it touches none of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.json"
    if file.exists():
        try:
            earlier = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise TrainError(
                f"{file} is damaged ({error}); give another --work, or remove that folder"
            ) from None
        is_ours = not earlier.keys().isdisjoint(run)
    else:
        is_ours = all(path.suffix == ".partial" for path in folder.iterdir())
    if not is_ours:
        raise TrainError(
            f"{folder} is not empty and not a folder of collected states; give a new or empty "
            f"folder with --work"
        )
    if not file.exists() or not _has_tokens(folder):
        (folder / "samples.jsonl").unlink(missing_ok=True)
        _write_whole(file, json.dumps(run, indent=1).encode())
        return tuple(run.get("layers", ()))
    for key in (*run, *earlier.keys() - {"layers"}):
        if run.get(key) != earlier.get(key):
            raise TrainError(
                f"{folder} has states collected with other settings: {key} was "
                f"{earlier.get(key)!r} and is now {run.get(key)!r}; give another --work, or remove "
                f"that folder"
            )
    return tuple(earlier.get("layers", ()))


def _has_tokens(folder: Path) -> bool:
    return n_samples(folder) > 0 and any(
        sample.ids for sample in _read_samples(folder / "samples.jsonl")
    )


def n_samples(folder: Path) -> int:
    """How many samples have been written. Drops an incomplete last line from the file."""
    file = folder / "samples.jsonl"
    if not file.exists():
        return 0
    data = file.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        file.write_bytes(complete)
    return complete.count(b"\n")


def all_written(folder: Path) -> bool:
    """Whether ``write_samples`` has finished."""
    return (folder / "ends.npy").exists()


def write_samples(
    folder: Path,
    samples: Iterable[Sample],
    max_tokens: int,
    progress: Callable[[int, int], None],
) -> None:
    """Append samples to those already written, up to ``max_tokens`` tokens in all.

    ``progress(n_tokens, max_tokens)`` is called after each. Raises TrainError if there is no token.
    """
    if all_written(folder):
        return
    n_before = n_samples(folder)
    file = folder / "samples.jsonl"
    n_tokens = sum(len(sample.ids) for sample in _read_samples(file)) if n_before else 0
    with file.open("a", encoding="utf-8") as lines:
        for sample in samples:
            if n_tokens >= max_tokens:
                break
            sample = sample.cut(0, max_tokens - n_tokens)
            lines.write(json.dumps(asdict(sample), separators=(",", ":")) + "\n")
            lines.flush()
            n_tokens += len(sample.ids)
            progress(n_tokens, max_tokens)
    if n_tokens == 0:
        raise TrainError("the data contains no text; give files that do")
    samples = list(_read_samples(file))
    ends = np.cumsum([len(sample.ids) for sample in samples], dtype=np.int64)
    tokens = np.concatenate([sample.ids for sample in samples]).astype(np.int32)
    # ends.npy comes last: if it exists, all three are complete.
    for name, values in (("tokens", tokens), ("until", _span_ends(samples)), ("ends", ends)):
        content = io.BytesIO()
        np.save(content, values)
        _write_whole(folder / f"{name}.npy", content.getvalue())


def _span_ends(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    found = np.zeros(sum(len(sample.ids) for sample in samples), np.int64)
    first = 0
    for sample in samples:
        spans = [(0, len(sample.ids))] if sample.spans is None else sample.spans
        for start, end in spans:
            found[first + start : first + end] = first + end
        first += len(sample.ids)
    return found


def collect(
    folder: Path,
    context: Context,
    progress: Callable[[int, int], None],
    layers: Sequence[int] = (),
) -> States:
    """Decode every sequence and store each token's hidden state and greedy choice; resumable.

    Stores the inputs of ``layers`` too. ``progress(n_tokens, n_all)`` is called after each
    sequence. Raises TrainError if the disk is too full, UnsupportedModel if llama.cpp does not
    expose the inputs of layers for this model.
    """
    tokens = np.load(folder / "tokens.npy")
    ends = np.load(folder / "ends.npy")
    done_file = folder / "done"
    done = int(done_file.read_text()) if done_file.exists() else 0
    n_embd = context.model.n_embd_out
    n_left = len(tokens) - (int(ends[done - 1]) if done else 0)
    # Writing to a mapped file on a full disk raises SIGBUS, so check before.
    _check_disk_space(folder, n_left * (2 * n_embd * (1 + len(layers)) + 4))
    hidden = _open_mapped(folder / "hidden.npy", np.float16, (len(tokens), n_embd))
    choices = _open_mapped(folder / "choices.npy", np.int32, (len(tokens),))
    width = len(layers) * context.model.n_embd
    inner = (
        _open_mapped(folder / "layers.npy", np.float16, (len(tokens), width)) if layers else None
    )

    step = min(CHUNK, context.n_batch)  # a small context has a small batch

    def flush(n_sequences: int) -> None:
        hidden.flush()
        choices.flush()
        if inner is not None:
            inner.flush()
        _write_whole(done_file, str(n_sequences).encode())

    context.want_hidden(True)
    context.want_layers(layers)
    try:
        for i in range(done, len(ends)):
            start = int(ends[i - 1]) if i else 0
            end = int(ends[i])
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
            if (i + 1) % _FLUSH_EVERY == 0:
                flush(i + 1)
    finally:
        context.want_hidden(False)
        context.want_layers(())
        context.seq_rm(-1, 0, -1)
    flush(len(ends))
    return States(folder)


def _write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary name, then rename it."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def _read_samples(file: Path) -> Iterable[Sample]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield Sample(**json.loads(line))


def _open_mapped(file: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    if file.exists():
        found: np.memmap[Any, Any] = np.load(file, mmap_mode="r+")
        return found
    created: np.memmap[Any, Any] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        file, mode="w+", dtype=dtype, shape=shape
    )
    return created


def _check_disk_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise TrainError(
            f"the states need {n_bytes / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB "
            f"free; lower --max-tokens, or give a --work on another disk"
        )
