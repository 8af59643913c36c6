"""Training data: texts, prompts and chats, and the hidden states collected for them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import text_rows
from speculation.engine import Engine
from speculation.train import TrainError, states
from speculation.train.texts import Sample, generate_replies, read_texts
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.train_data import lines


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, EXACT) as engine:
        yield engine


@pytest.fixture(scope="module")
def writer(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, replace(EXACT, n_ctx=256), parallel=2) as engine:
        yield engine


def test_texts_and_chats_are_cut_into_sequences(engine: Engine, tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("the cat saw a dog", encoding="utf-8")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    mixed = lines(tmp_path / "b.jsonl.gz", {"text": "the cat"}, {"messages": chat})
    samples = list(read_texts(engine.model, [plain, mixed], 4))
    texts = [engine.model.detokenize(sample.ids) for sample in samples]
    assert b"".join(texts).startswith(b"<s>the cat saw a dog<s>the cat<s><|user|>a<|end|>")
    assert all(len(sample.ids) <= 4 and sample.spans is None for sample in samples)
    assert list(read_texts(engine.model, [plain, mixed], 4, skip=2)) == samples[2:]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *(
            (line, "is .*must be an object with text")
            for line in ('{"story": "x"}', "nonsense", '{"text": 5}', '{"turns": "12"}', "[1]")
        ),
        *(
            (
                '{"messages": [{"role": "user", "content": "a"}, {' + message + "}]}",
                "message 2 is .*needs a role",
            )
            for message in ('"content": "x"', '"role": "tool", "content": "x"', '"role": "user"')
        ),
    ],
)
def test_an_invalid_line_is_named(writer: Engine, tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "the cat"}\n' + line + "\n", encoding="utf-8")
    for samples in (read_texts(writer.model, [file], 64), generate_replies(writer, [file], 64, 2)):
        with pytest.raises(TrainError, match=rf"bad\.jsonl, line 2.*{reason}"):
            list(samples)


def test_a_byte_order_mark_is_ignored(engine: Engine, tmp_path: Path) -> None:
    file = lines(tmp_path / "p.jsonl", {"text": "the"})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert list(read_texts(engine.model, [file], 4)) == [Sample(engine.model.tokenize("the"))]


def test_the_error_for_prompts_without_replies_suggests_generate(
    engine: Engine, tmp_path: Path
) -> None:
    message = {"role": "user", "content": "the cat"}
    for line in ({"prompt": "the cat"}, {"turns": ["a", "b"]}, {"messages": [message]}):
        file = lines(tmp_path / "p.jsonl", line)
        with pytest.raises(TrainError, match="add --generate N"):
            list(read_texts(engine.model, [file], 64))


def test_own_replies_equal_plain_decoding_and_are_marked_by_spans(
    engine: Engine, writer: Engine, tmp_path: Path
) -> None:
    file = lines(
        tmp_path / "p.jsonl", {"prompt": "the cat"}, {"text": "a dog and"}, {"turns": ["a", "b"]}
    )
    samples = list(generate_replies(writer, [file], 128, 10))
    assert len(samples) == 3
    for sample in samples:
        assert sample.spans is not None
        start, end = sample.spans[-1]
        plain = engine.generate(sample.ids[:start], method="ar", max_tokens=10).run()
        assert sample.ids[start:end] == plain.token_ids
    assert list(generate_replies(writer, [file], 128, 10, skip=2)) == samples[2:]


def test_a_reply_that_the_next_turn_renders_differently_is_not_learnt_from(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}a{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    path = write_tiny_gguf(tmp_path / "m.gguf", chat_template=template)
    file = lines(tmp_path / "p.jsonl", {"turns": ["the cat", "a dog"]}, {"prompt": "the cat"})
    with Engine.load(path, replace(EXACT, n_ctx=256), parallel=2) as engine:
        two, one = generate_replies(engine, [file], 128, 6)
    assert len(one.spans or []) == 1
    assert two.spans == [(len(two.ids) - 6, len(two.ids))]


def test_a_truncated_or_damaged_gzip_file_is_named(engine: Engine, tmp_path: Path) -> None:
    file = lines(tmp_path / "d.jsonl.gz", *[{"text": f"text {n}"} for n in range(2000)])
    content = file.read_bytes()
    for spoilt in (content[:-200], content[:100] + bytes(300) + content[400:], b"no gzip"):
        file.write_bytes(spoilt)
        with pytest.raises(TrainError, match=r"d\.jsonl\.gz is not a complete gzip file \("):
            list(read_texts(engine.model, [file], 64))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_is_not_text_is_named(engine: Engine, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"ab\xff\x00")
    with pytest.raises(InvalidParameter, match=f"{name} is not UTF-8 text .*; give text files"):
        list(read_texts(engine.model, [file], 64))


def test_prompts_without_room_for_a_reply_are_counted(writer: Engine, tmp_path: Path) -> None:
    prompts = [{"prompt": "the cat saw a dog"}, {"prompt": "the cat"}]
    file = lines(tmp_path / "p.jsonl", *prompts)
    with pytest.raises(TrainError) as caught:
        list(generate_replies(writer, [file], 64, 64))
    shortest = min(len(sample.ids) - 1 for sample in generate_replies(writer, [file], 64, 1))
    assert str(caught.value) == (
        f"none of the 2 prompts leaves room for --generate 64 in a context of 64: the shortest has "
        f"{shortest} tokens; raise --ctx to at least {shortest + 64} or lower --generate"
    )
    found = generate_replies(writer, [file], shortest + 4, 4)
    assert [bool(sample.ids) for sample in found] == [False, True]


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
    run, layers = {"target": "x", "ctx": 512}, (1, 2, 3)
    assert states.begin(tmp_path, {**run, "layers": [1, 2, 3]}) == layers
    states.write_samples(tmp_path, [Sample([5])], 8)
    assert states.begin(tmp_path, run) == layers  # they serve a head without layers, too
    with pytest.raises(TrainError, match="ctx was 512 and is now 64; give another --work"):
        states.begin(tmp_path, {"target": "x", "ctx": 64})
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
