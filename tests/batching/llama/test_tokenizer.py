"""Long texts are tokenized in pieces, with the tokens of the whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf import TokenType

from batching.llama import tokenizer
from batching.llama.charset import any_of
from batching.llama.model import Model
from batching.watched import GivenUp, until
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
