"""The bundled model's file: vocabulary, chat template, size. Its answers are not tested."""

from __future__ import annotations

import random
from collections.abc import Iterator

import llama_cpp
import pytest
import sentencepiece

from batching.llama.model import Model
from speculation.chat.template import chat_text
from tests.support.paths import MODELS

GGUF = MODELS / "speculation-14m-q8_0.gguf"
TOKENIZER = MODELS / "speculation-14m.tokenizer.model"

LINES = """
The quick brown fox jumps over the lazy dog.
"Well," said she, "it's half past nine -- isn't it?"
It costs $1,299.99 (about 12.5% more than in 2019), or 3/4 of 10^6.
Call 555-0134 or write to ann.smith@example.org before 14:30 on 2026-03-05.
  two spaces in front, and  two   or three between
	a tab, then	another
def area(width: float, height: float = 1.0) -> float:
    return width * height  # square metres
for (int i = 0; i < n; ++i) { total += a[i] & 0xFF; }
{"name": "Ann", "tags": ["x", "y"], "n": null, "ok": true}
<div class="a">&amp; <b>bold</b></div>
| a | b |
|---|---|
- one
* two
1. three
``` fenced ```
ALL CAPITALS AND camelCase, snake_case, kebab-case, PascalCase
aaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbb ababababab
Donaudampfschifffahrtsgesellschaftskapitän, façade, naïve, Ærøskøbing, żółć
Ελληνικά, русский текст, עברית, العربية, हिन्दी, ไทย
日本語の文章です。中文，句號。한국어 문장입니다.
😀 👍🏽 👩‍👩‍👧 🇫🇷 ✈️ ♥ ☃
“curly” ‘quotes’ – en — em … ellipsis · bullet • ™ © ® ½ ² €
a\u00a0no-break space, a\u200bzero-width space, a combining e\u0301
a literal \u2581 lower block
<s> </s> <unk> <|user|> <|end|> <|assistant|> <0x0A> written as text
x=1;y=2;;z=!=3??!!...,,,:::---___===
0 1 12 123 1234 12345 1234567890 007 3.14159 -40 +5
""".strip("\n").split("\n")


def held_out_lines() -> Iterator[str]:
    """The lines above, their concatenation, and random mixtures of their words and letters."""
    yield from LINES
    yield "spaces at the end   "
    yield "\n".join(LINES)
    yield "\n\n\n" + "\n \n".join(LINES[:5]) + "\n\n"
    rng = random.Random(20)
    words = [word for line in LINES for word in line.split(" ")]
    letters = "".join(LINES)
    for _ in range(300):
        yield rng.choice((" ", "  ", "\n", ", ")).join(rng.choices(words, k=rng.randint(1, 30)))
        yield "".join(rng.choices(letters, k=rng.randint(1, 60)))
    for _ in range(50):
        codes = (rng.choice((rng.randrange(0x20, 0x2FFF), rng.randrange(0x1F300, 0x1FAFF)))
                 for _ in range(12))  # fmt: skip
        yield "".join(map(chr, codes))


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(GGUF) as model:
        yield model


def tokenize(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False)


def test_sentencepiece_and_llama_cpp_tokenize_held_out_text_alike(model: Model) -> None:
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER))
    for line in held_out_lines():
        assert tokenize(model, line) == tokenizer.encode(line), line


def test_every_byte_has_a_token_so_that_no_text_aborts_the_process(model: Model) -> None:
    texts = [llama_cpp.llama_vocab_get_text(model.vocab, 6 + byte) for byte in range(256)]
    assert texts == [b"<0x%02X>" % byte for byte in range(256)]
    assert tokenize(model, "\U0010fffd") == [6 + byte for byte in b"\xf4\x8f\xbf\xbd"]


def test_the_model_is_a_small_llama_with_a_context_of_2048_and_one_end_token(model: Model) -> None:
    assert GGUF.stat().st_size <= 16_000_000
    assert model.metadata("general.architecture") == "llama"
    assert model.n_ctx_train == 2048
    assert model.ends == {2}
    assert llama_cpp.llama_vocab_get_text(model.vocab, 2) == b"<|end|>"


def test_the_template_puts_a_control_token_before_each_message_and_one_after(model: Model) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = chat_text(model, messages)
    assert text == "<s><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"


def test_template_markers_are_single_tokens_that_plain_text_cannot_produce(model: Model) -> None:
    markers = "<s><|end|><|system|><|user|><|assistant|>"
    assert model.tokenize(markers, add_special=False, parse_special=True) == [1, 2, 3, 4, 5]
    assert min(tokenize(model, markers)) > 5
