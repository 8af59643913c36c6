"""Vectors of texts, against means of hidden states that are computed by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import PoolingType

from batching.errors import InvalidParameter, PromptTooLong, UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import text_rows
from batching.tree import Floats
from speculation.engine import Engine
from tests.support.exact import EXACT, endless
from tests.support.tiny_gguf import write_bert_gguf, write_tiny_gguf

TEXTS = ["the cat saw a dog", "a", "and the dog and the cat and the er in"]


def states(context: Context, tokens: Sequence[int]) -> Floats:
    """The hidden states of tokens that are decoded in one batch, (n_tokens, n_embd)."""
    context.seq_rm(-1, 0, -1)
    context.want_hidden(True)
    output = context.decode(text_rows(tokens, 0, [True] * len(tokens)))
    found = np.array([output.hidden(row) for row in range(len(tokens))])
    context.seq_rm(-1, 0, -1)
    context.want_hidden(False)
    return found


def of_length_1(vector: Floats) -> Floats:
    scaled: Floats = vector / np.linalg.norm(vector)
    return scaled


@pytest.fixture(scope="module")
def long_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("long") / "tiny.gguf", n_ctx=16384)
    with Engine.load(path, replace(EXACT, n_batch=64), n_ctx=16384) as engine:
        yield engine


@pytest.mark.parametrize(
    ("pooling", "pick"),
    [
        (None, lambda found: found.mean(axis=0)),
        (PoolingType.MEAN, lambda found: found.mean(axis=0)),
        (PoolingType.CLS, lambda found: found[0]),
        (PoolingType.LAST, lambda found: found[-1]),
    ],
)
def test_a_vector_is_made_of_the_states_as_the_file_says(
    pooling: PoolingType | None, pick: Callable[[Floats], Floats], tmp_path: Path
) -> None:
    def more(writer: Any) -> None:
        if pooling is not None:
            writer.add_pooling_type(pooling)
            writer.add_add_eos_token(True)

    path = write_tiny_gguf(tmp_path / "tiny.gguf", more=more)
    end = [] if pooling is None else [2]
    with Engine.load(path, replace(EXACT, n_batch=4, n_seq_max=4)) as engine:  # pieces of 4 rows
        found = engine.embed([*TEXTS, [5, 6, 7]])
        texts = [[*engine.model.tokenize(text), *end] for text in TEXTS] + [[5, 6, 7]]
        assert found.n_tokens == tuple(map(len, texts))
        with Context(engine.model, EXACT) as whole:
            expected = [of_length_1(pick(states(whole, tokens))) for tokens in texts]
        assert np.allclose(found.vectors, expected, atol=1e-5)
        # What is written is not changed by it.
        before = engine.generate("the cat", method="ar", max_tokens=5).run().token_ids
        engine.embed(TEXTS)
        assert engine.generate("the cat", method="ar", max_tokens=5).run().token_ids == before


def test_the_bundled_model_gives_the_mean_of_its_states() -> None:
    with Engine.load("bundled", n_ctx=512) as engine:
        texts = ["The capital of France is Paris.", "Paris is a city.", "Bake the bread."]
        found = engine.embed(texts).vectors
        with Context(engine.model, engine.context.params) as whole:
            means = [states(whole, engine.model.tokenize(text)).mean(axis=0) for text in texts]
        # Kernels for a few rows round otherwise than those for many.
        alike = (found * np.array(list(map(of_length_1, means)))).sum(axis=1)
        assert (alike > 0.999).all(), alike


def test_texts_are_written_between_pieces_and_what_has_no_vector_is_refused(
    long_engine: Engine,
) -> None:
    sampling = endless(long_engine)
    text = long_engine.generate("the cat", method="ar", sampling=sampling, max_tokens=16000)
    tokens = iter(text)
    next(tokens)  # it is being written
    n_steps: list[int] = []
    long_engine.embed([[5] * 640], check=lambda: n_steps.append(text.stats.n_steps))
    text.cancel()
    assert len(n_steps) >= 10  # a batch has 64 rows
    assert all(later > earlier for earlier, later in pairwise(n_steps))
    for texts, error, reason in (
        ("text", InvalidParameter, "give a list of texts"),
        ([], InvalidParameter, "give a list of texts"),
        ([[]], InvalidParameter, "text 0 has no tokens"),
        (["a", [10**6]], InvalidParameter, "text 1 has token 1000000"),
        ([[5] * 16385], PromptTooLong, "text 0 has 16385 tokens, and the model reads 16384"),
    ):
        given: Any = texts
        with pytest.raises(error, match=reason):
            long_engine.embed(given)


def test_several_threads_and_a_failing_check_change_no_vector(long_engine: Engine) -> None:
    texts = [[token] * 200 for token in range(5, 9)]
    expected = long_engine.embed(texts).vectors
    found: dict[int, Floats] = {}

    def embed(number: int) -> None:
        found[number] = long_engine.embed([texts[number]]).vectors[0]

    def stop() -> None:
        raise InterruptedError("enough")

    threads = [threading.Thread(target=embed, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(InterruptedError, match="enough"):
        long_engine.embed(texts, check=stop)
    for thread in threads:
        thread.join()
    assert np.array_equal([found[number] for number in range(4)], expected)


def as_embedding_model(pooling: PoolingType) -> Callable[[Any], None]:
    def more(writer: Any) -> None:
        writer.add_causal_attention(False)
        writer.add_pooling_type(pooling)

    return more


def test_an_embedding_model_reads_in_both_directions(tiny_model: Path, tmp_path: Path) -> None:
    more = as_embedding_model(PoolingType.MEAN)
    path = write_tiny_gguf(tmp_path / "embeds.gguf", n_embd=64, seed=1, n_ctx=1024, more=more)
    with Engine.load(tiny_model, EXACT, embedding_model=path) as engine:
        # More than a batch has, and one that is longer than the context at first.
        texts: list[str | Sequence[int]] = [*TEXTS, *["the dog"] * 20, [5] * 700]
        found = engine.embed(texts)
        alone = [engine.embed([texts[i]]).vectors[0] for i in (0, 1, 2, -1)]
        assert found.vectors.shape == (24, 64)
        together = [*found.vectors[:3], found.vectors[-1]]
        assert np.allclose(together, alone, atol=1e-3)  # its cache is F16
        assert engine.generate("the cat", max_tokens=3).run().token_ids
    with Model(path, embedding=True) as model, Context(model, EXACT, causal=False) as whole:
        means = [states(whole, model.tokenize(text)).mean(axis=0) for text in TEXTS]
    assert np.allclose(found.vectors[:3], list(map(of_length_1, means)), atol=1e-3)
    causal = write_tiny_gguf(tmp_path / "causal.gguf", n_embd=64, seed=1, n_ctx=1024)
    with Engine.load(causal, EXACT) as engine:
        assert not np.allclose(engine.embed(TEXTS).vectors[0], found.vectors[0], atol=1e-2)


def bert_states(path: Path, tokens: Sequence[int]) -> Floats:
    """The states that a BERT model of one layer has, computed from its weights."""
    file = GGUFFile(path)
    weight: dict[str, Floats] = {name: file.tensor(name) for name in file.tensors}

    def normed(x: Floats) -> Floats:
        found: Floats = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
        return found

    def times(x: Floats, name: str) -> Floats:
        found: Floats = x @ weight[f"blk.0.{name}.weight"].T
        return found

    n, n_head = len(tokens), 4
    x = weight["token_embd.weight"][list(tokens)] + weight["position_embd.weight"][:n]
    x = normed(x + weight["token_types.weight"][0])
    q, k, v = (
        times(x, name).reshape(n, n_head, -1).swapaxes(0, 1)
        for name in ("attn_q", "attn_k", "attn_v")
    )
    scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]))
    mixed = scores / scores.sum(axis=2, keepdims=True) @ v
    x = normed(x + times(mixed.swapaxes(0, 1).reshape(n, -1), "attn_output"))
    up = times(x, "ffn_up")
    gelu = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
    return normed(x + times(gelu, "ffn_down"))


@pytest.mark.parametrize(
    ("pooling", "pick"),
    [
        (PoolingType.MEAN, lambda found: found.mean(axis=0)),
        (PoolingType.CLS, lambda found: found[0]),
        (PoolingType.LAST, lambda found: found[-1]),
    ],
)
def test_a_bert_model_without_a_cache_gives_its_pooled_states(
    pooling: PoolingType, pick: Callable[[Floats], Floats], tiny_model: Path, tmp_path: Path
) -> None:
    path = write_bert_gguf(tmp_path / "bert.gguf", pooling)
    with Engine.load(tiny_model, EXACT, embedding_model=path) as engine:
        found = engine.embed(TEXTS * 9).vectors  # 27 texts, in two batches
        tokens = [engine.model.tokenize(text) for text in TEXTS]  # they have one vocabulary
        with pytest.raises(PromptTooLong, match="has 129 tokens, and the model reads 128 at most"):
            engine.embed([[5] * 129])
    expected = [of_length_1(pick(bert_states(path, text))) for text in tokens]
    assert np.allclose(found, expected * 9, atol=5e-3)


@pytest.mark.parametrize(
    ("pooling", "reason"),
    [(PoolingType.NONE, "names no pooling"), (PoolingType.RANK, "ranks texts")],
)
def test_a_model_without_vectors_is_refused(
    pooling: PoolingType, reason: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = write_bert_gguf(tmp_path / "bert.gguf", pooling)
    with pytest.raises(UnsupportedModel, match=f"{reason}, so it gives no vector for a text"):
        Engine.load(tiny_model, embedding_model=path)
    with pytest.raises(UnsupportedModel, match="load it beside a text model, as embedding_model"):
        Engine.load(path)
