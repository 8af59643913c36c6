"""Long texts in pieces have the tokens of the whole; what a vocabulary cannot spell is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import TokenType

from batching.errors import InvalidParameter
from batching.llama import tokenizer
from batching.llama.charset import any_of
from batching.llama.model import Model
from batching.watched import GivenUp, until
from speculation.engine import Engine
from tests.support.exact import EXACT
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf

TEXTS = (
    "The cat, the dog, and 1234 others: naïve 漢字 😀!\n\n" * 60,
    "<|user|>a cat<|end|><|assistant|> the dog <|end|>" * 60,
    "<|user|>" * 400,
    "x<|end|>" * 400,
    "\n" * 3000,
    " " * 3000,
    "QmFzZTY0IGhhcyBubyBzcGFjZXM" * 100,
    "e\u0301" * 1500,
    "<|us" * 700,
)


@pytest.fixture(scope="module", params=["tiny", "space", "bundled"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "bundled":
        return Model(ROOT / "models" / "speculation-14m-q8_0.gguf")

    def with_space(writer: object) -> None:
        for part in writer.kv_data:  # type: ignore[attr-defined]
            part.pop("tokenizer.ggml.add_space_prefix", None)
        writer.add_add_space_prefix(True)  # type: ignore[attr-defined]

    last = with_space if request.param == "space" else None
    return Model(write_tiny_gguf(folder / "tiny.gguf", last=last))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    model: Model, text: str, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.tokenize(text, parse_special=special)
    monkeypatch.setattr(tokenizer, "PIECE", 700)
    monkeypatch.setattr(tokenizer, "_OVERLAP", 200)
    parts = model.tokenize(text, parse_special=special)
    assert model.detokenize(parts) == model.detokenize(whole)
    if len(set(text)) > 2:  # a run of one character may be cut
        assert parts == whole


def test_the_work_on_a_long_text_ends_when_nobody_waits_for_it(tiny_model: Path) -> None:
    asked: list[int] = []

    def is_over() -> bool:
        asked.append(0)
        return len(asked) == 4

    with Model(tiny_model) as model:
        with pytest.raises(GivenUp), until(is_over):
            model.tokenize("a cat " * 100_000)
        assert len(model.tokenize("a cat " * 10_000, add_special=False)) == 50_001
    assert len(asked) == 4


@pytest.mark.parametrize("pre", ["deepseek-llm", "falcon", "smollm"])
def test_a_run_without_a_gap_does_not_end_the_process(tmp_path: Path, pre: str) -> None:
    """llama.cpp's regular expressions recurse for each of its characters."""

    def as_bpe(writer: object) -> None:
        for part in writer.kv_data:  # type: ignore[attr-defined]
            for name in ("tokens", "scores", "token_type"):
                part.pop(f"tokenizer.ggml.{name}", None)
        letters = [chr(33 + i) for i in range(94)] + [chr(0x100 + i) for i in range(256)]
        tokens = ["<unk>", "<s>", "</s>", "<|end|>", *letters]
        n = 305  # as many as the embedding has
        writer.add_token_list(tokens[:n])  # type: ignore[attr-defined]
        writer.add_token_types([TokenType.CONTROL] * 4 + [TokenType.NORMAL] * (n - 4))  # type: ignore[attr-defined]
        writer.add_token_merges(["a a"])  # type: ignore[attr-defined]
        writer.add_tokenizer_pre(pre)  # type: ignore[attr-defined]

    path = write_tiny_gguf(tmp_path / "bpe.gguf", tokenizer="gpt2", last=as_bpe)
    with Model(path) as model:
        for text in ("b" * 400_000, "!" * 400_000, "7" * 100_000):
            assert len(model.tokenize(text, add_special=False)) == len(text)


def test_a_pattern_of_many_texts_follows_their_beginnings() -> None:
    texts = ["<|end|>", "<|im_end|>", "<|im_start|>", "<|im_", "x", "xyz", "[", "|"]
    pattern = re.compile(any_of(texts))
    assert pattern.findall("<|im_<|im_end|>xy[xyz<|end|><|end") == [
        "<|im_",
        "<|im_end|>",
        "x",
        "[",
        "xyz",
        "<|end|>",
        "|",
    ]
    assert re.compile(any_of([])).search("anything") is None


@pytest.fixture(scope="module")
def without_bytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models")
    with Engine.load(write_tiny_gguf(folder / "few.gguf", n_bytes=0), EXACT) as engine:
        yield engine


def test_what_the_vocabulary_cannot_spell_is_named_and_the_engine_stays_usable(
    without_bytes: Engine,
) -> None:
    with pytest.raises(InvalidParameter, match="has no token for 'Z' or its bytes; remove it"):
        without_bytes.generate("a catZ")
    assert without_bytes.generate("a cat é", method="ar", max_tokens=3).run().token_ids
    model = without_bytes.model
    assert model.tokenize("<|user|>a", parse_special=True)[1] == 4
    with pytest.raises(InvalidParameter, match="has no token for '<'"):
        model.tokenize("<|user|>a")
    assert without_bytes.model.n_vocab == 49
    without_bytes.prepare()


def test_byte_tokens_can_spell_every_character(engine: Engine) -> None:
    assert engine.model.tokenize("Z", add_special=False) == [3 + ord("Z")]


def test_no_eos_is_appended_to_a_prompt(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "ends.gguf", more=lambda w: w.add_add_eos_token(True))
    with Model(path) as model:
        assert model.special_token("eos") == 2
        assert model.tokenize("a")[0] == 1
        assert 2 not in model.tokenize("a")
        assert model.tokenize("</s>", parse_special=True) == [1, 2]
