"""Training data: texts, prompts, chats and tokens, and errors in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batching.errors import InvalidParameter
from speculation.engine import Engine
from speculation.train import TrainError
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
    for samples in (
        read_texts(writer.model, [file], 64),
        generate_replies(writer, [file], 64, 2),
    ):
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
    room = shortest + 4
    assert [bool(sample.ids) for sample in generate_replies(writer, [file], room, 4)] == [
        False,
        True,
    ]
