"""Collects the target's hidden states and greedy choices over the training data, in mapped files.

One folder holds one collection. Collecting can stop at any time and resumes where it stopped:

    run.json       target, data and options of the collection
    samples.jsonl  token ids and generated spans of each sequence, one sequence per line
    done           number of sequences read so far; missing until all samples are written
    hidden.npy     (n, n_embd) float16: hidden state after the final norm, of n tokens in all
    layers.npy     (n, n_layers * n_embd) float16: auxiliary hidden states, the inputs of some
                   layers, for heads that read them
    choices.npy    (n,) int32: the target's greedy choice after each token
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.llama.context import Context
from batching.replacing import replacing
from batching.rows import text_rows
from batching.target import Output
from speculation.train import TrainError
from speculation.train.texts import Sample

CHUNK = 128  # rows per decode; each has a row of logits, large with a large vocabulary
_FLUSH_EVERY = 50  # sequences


class States:
    """A finished collection: its sequences, concatenated, and the arrays, mapped into memory.

    tokens    (n,)
    ends      end of each sequence, (n_sequences,)
    span_end  end of the token's span if it is trained on, else 0, (n,)
    hidden, choices, layers  see the module's docstring; layers is None if not collected
    """

    def __init__(self, folder: Path) -> None:
        samples = _read_samples(folder)
        self.tokens, self.ends = _concatenated(samples)
        self.span_end = np.zeros(len(self.tokens), np.int64)
        for sample, end in zip(samples, self.ends, strict=True):
            first = end - len(sample.ids)
            for a, b in sample.spans if sample.spans is not None else [(0, len(sample.ids))]:
                self.span_end[first + a : first + b] = first + b
        self.hidden: npt.NDArray[np.float16] = np.load(folder / "hidden.npy", mmap_mode="r")
        self.layers: npt.NDArray[np.float16] | None = None
        if (folder / "layers.npy").exists():
            self.layers = np.load(folder / "layers.npy", mmap_mode="r")
        self.choices: npt.NDArray[np.int32] = np.load(folder / "choices.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, layers: Sequence[int] = ()) -> npt.NDArray[np.float16]:
        """What a head reads: the inputs of ``layers``, or without any the hidden states.

        Raises TrainError if the inputs were not collected.
        """
        if layers and self.layers is None:
            raise TrainError(
                "the states were collected without the inputs of layers; collect again"
            )
        return self.layers if layers and self.layers is not None else self.hidden


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
    return n_samples(folder) > 0 and any(sample.ids for sample in _read_samples(folder))


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
    return (folder / "done").exists()


def write_samples(
    folder: Path,
    samples: Iterable[Sample],
    max_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Append samples to those already written, up to ``max_tokens`` tokens in all.

    ``progress(n_tokens, max_tokens)`` is called after each. Raises TrainError if there is no token.
    """
    if all_written(folder):
        return
    before = _read_samples(folder) if n_samples(folder) else []
    n_tokens = sum(len(sample.ids) for sample in before)
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as lines:
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
    _write_whole(folder / "done", b"0")


def collect(
    folder: Path,
    context: Context,
    progress: Callable[[int, int], None] = lambda done, total: None,
    layers: Sequence[int] = (),
) -> States:
    """Decode every sequence and store each token's hidden state and greedy choice; resumable.

    Stores the inputs of ``layers`` too. ``progress(n_tokens, n_all)`` is called after each
    sequence. Raises TrainError if the disk is too full, UnsupportedModel if llama.cpp does not
    expose the inputs of layers for this model.
    """
    tokens, ends = _concatenated(_read_samples(folder))
    done = int((folder / "done").read_text())
    n_left = len(tokens) - (int(ends[done - 1]) if done else 0)
    width, width_in = context.model.n_embd_out, len(layers) * context.model.n_embd
    # Writing to a mapped file on a full disk raises SIGBUS, so check before.
    _check_disk_space(folder, n_left * (2 * (width + width_in) + 4))
    arrays: list[tuple[np.memmap[Any, Any], Callable[[Output, int], Any]]] = [
        (_mapped(folder, "hidden", np.float16, len(tokens), width), lambda o, row: o.hidden(row)),
        (_mapped(folder, "choices", np.int32, len(tokens)), lambda o, row: o.argmax(row)),
    ]
    if layers:
        inner = _mapped(folder, "layers", np.float16, len(tokens), width_in)
        arrays.append((inner, lambda o, row: o.aux_hidden_states(row, layers)))
    step = min(CHUNK, context.n_batch)  # a small context has a small batch

    def flush(n_sequences: int) -> None:
        for array, _ in arrays:
            array.flush()
        _write_whole(folder / "done", str(n_sequences).encode())

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
                for array, read in arrays:
                    for row in range(len(chunk)):
                        array[first + row] = read(output, row)
            progress(end, len(tokens))
            if (i + 1) % _FLUSH_EVERY == 0:
                flush(i + 1)
    finally:
        context.want_hidden(False)
        context.want_layers(())
        context.seq_rm(-1, 0, -1)
    flush(len(ends))
    return States(folder)


def _write_whole(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def _read_samples(folder: Path) -> list[Sample]:
    with (folder / "samples.jsonl").open(encoding="utf-8") as lines:
        return [Sample(**json.loads(line)) for line in lines]


def _concatenated(samples: Sequence[Sample]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The tokens of all sequences, (n,), and the end of each, (n_sequences,)."""
    tokens = np.array([token for sample in samples for token in sample.ids], np.int32)
    return tokens, np.cumsum([len(sample.ids) for sample in samples], dtype=np.int64)


def _mapped(folder: Path, name: str, dtype: Any, *shape: int) -> np.memmap[Any, Any]:
    """An array in the folder, mapped into memory to be written."""
    file = folder / f"{name}.npy"
    if file.exists():
        return np.load(file, mmap_mode="r+")
    create: Any = np.lib.format.open_memmap
    return create(file, mode="w+", dtype=dtype, shape=shape)


def _check_disk_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise TrainError(
            f"the states need {n_bytes / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB "
            f"free; lower --max-tokens, or give a --work on another disk"
        )
