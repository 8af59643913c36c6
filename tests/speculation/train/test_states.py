"""Hidden states collected for training: saved, resumed, and never mixed with other settings."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import text_rows
from speculation.train import TrainError, states
from speculation.train.texts import Sample
from tests.support.exact import EXACT
from tests.support.train_data import lines


def test_states_equal_those_of_decoding_even_after_an_interruption(
    tiny_model: Path, tmp_path: Path
) -> None:
    samples = [Sample([5, 270, 271, 272]), Sample([6, 280], []), Sample([7, 8, 9], [(1, 3)])]
    with Model(tiny_model) as model, Context(model, EXACT) as context:

        def stop(done: int, total: int) -> None:
            if done >= 6:
                raise KeyboardInterrupt

        states.begin(tmp_path, {"target": "x"})
        states.write_samples(tmp_path, samples[:2], 8)
        (tmp_path / "done").unlink()  # stopped before all was written, in the middle of a line
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write('{"ids": [7, 8')
        assert states.n_samples(tmp_path) == 2
        states.write_samples(tmp_path, samples[2:], 8)
        with pytest.raises(KeyboardInterrupt):
            states.collect(tmp_path, context, stop)
        found = states.collect(tmp_path, context)
        assert found.tokens.tolist() == [5, 270, 271, 272, 6, 280, 7, 8]
        assert found.ends.tolist() == [4, 6, 8]
        assert found.span_end.tolist() == [4, 4, 4, 4, 0, 0, 0, 8]
        context.want_hidden(True)
        for first, end in ((0, 4), (4, 6), (6, 8)):
            context.seq_rm(-1, 0, -1)
            for position, token in enumerate(found.tokens[first:end].tolist()):
                output = context.decode(text_rows([token], position, [True]))
                at = first + position
                np.testing.assert_allclose(found.hidden[at], output.hidden(0), atol=2e-3)
                assert found.choices[at] == output.argmax(0)


def test_collection_resumes_after_the_last_saved_sequence(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_FLUSH_EVERY", 2)
    samples = [Sample(ids) for ids in ([5, 270], [6, 280, 281], [7, 8], [9, 10], [11, 12])]
    ends: list[int] = []

    def stop(done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    found = []
    for name in ("at once", "stopped"):
        folder = tmp_path / name
        states.begin(folder, {"target": "x"})
        states.write_samples(folder, samples, 100)
        with Model(tiny_model) as model, Context(model, EXACT) as context:
            if name == "stopped":
                with pytest.raises(KeyboardInterrupt):
                    states.collect(folder, context, stop)
                # This part is collected again.
                np.load(folder / "hidden.npy", mmap_mode="r+")[5:] = 1
            found.append(states.collect(folder, context, lambda done, _: ends.append(done)))
    assert ends == [2, 5, 7, 9, 11, 7, 9, 11]
    np.testing.assert_array_equal(found[0].hidden, found[1].hidden)
    np.testing.assert_array_equal(found[0].choices, found[1].choices)


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    states.begin(tmp_path, {"target": "x", "ctx": 512})
    states.write_samples(tmp_path, [Sample([5])], 8)
    states.begin(tmp_path, {"target": "x", "ctx": 512})
    with pytest.raises(TrainError, match="ctx was 512 and is now 64; give another --work"):
        states.begin(tmp_path, {"target": "x", "ctx": 64})


def test_states_with_layers_serve_a_head_without(tmp_path: Path) -> None:
    run = {"target": "x"}
    assert states.begin(tmp_path, {**run, "layers": [1, 2, 3]}) == (1, 2, 3)
    states.write_samples(tmp_path, [Sample([5])], 8)
    assert states.begin(tmp_path, run) == (1, 2, 3)
    with pytest.raises(TrainError, match=r"layers was \[1, 2, 3\] and is now \[4, 5, 6\]"):
        states.begin(tmp_path, {**run, "layers": [4, 5, 6]})


@pytest.mark.parametrize("samples", [[], [Sample([], [])]], ids=["none", "without tokens"])
def test_a_folder_in_which_nothing_was_collected_is_reused(
    tmp_path: Path, samples: list[Sample]
) -> None:
    states.begin(tmp_path, {"ctx": 512})
    with pytest.raises(TrainError, match="the data contains no text"):
        states.write_samples(tmp_path, samples, 8)
    states.begin(tmp_path, {"ctx": 64})
    assert states.n_samples(tmp_path) == 0
    states.write_samples(tmp_path, [Sample([5])], 8)
    with pytest.raises(TrainError, match="ctx was 64 and is now 512"):
        states.begin(tmp_path, {"ctx": 512})


@pytest.mark.parametrize("name", ["samples.jsonl", "run.json", "tokens.npy"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, name: str) -> None:
    mine = lines(tmp_path / name, {"prompt": "the cat"})
    with pytest.raises(TrainError, match=r"is not empty and not a folder of collected states"):
        states.begin(tmp_path, {"target": "x"})
    assert list(tmp_path.iterdir()) == [mine]
    assert mine.read_text(encoding="utf-8") == '{"prompt": "the cat"}\n'


def test_disk_space_is_checked_again_on_resuming(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.begin(tmp_path, {"target": "x"})
    samples = [Sample([5, 270]), Sample([6, 280, 7])]
    states.write_samples(tmp_path, samples, 8)
    (tmp_path / "done").write_text("1")
    with Model(tiny_model) as model, Context(model, EXACT) as context:
        n_bytes = 3 * (2 * model.n_embd_out + 4)  # what the second sample takes
        for free, is_enough in ((n_bytes - 1, False), (n_bytes, True)):
            usage = SimpleNamespace(free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
            if is_enough:
                states.collect(tmp_path, context)
            else:
                with pytest.raises(TrainError, match="the states need .* GiB free; lower"):
                    states.collect(tmp_path, context)


def test_a_disk_that_fills_up_loses_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled_up(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    samples = [Sample([5, 270]), Sample([6])]
    states.begin(tmp_path, {"target": "x"})
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", filled_up)
        with pytest.raises(OSError, match="No space left"):
            states.write_samples(tmp_path, samples, 8)
    states.begin(tmp_path, {"target": "x"})
    assert states.n_samples(tmp_path) == 2
    states.write_samples(tmp_path, [], 8)
    assert states.all_written(tmp_path)
