"""DFlash: heads in llama.cpp's own form that draft a block at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.cache import SequenceCache
from batching.gguf.reader import GGUFFile
from batching.llama.batch import BatchMemory
from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import Rows, text_rows
from batching.together import run
from batching.tree import Floats
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.head_context import BlockContext
from speculation.engine import Engine
from tests.support.exact import EXACT, PROMPT, endless, same_texts
from tests.support.fake_target import prefill
from tests.support.head_checks import TEXT, check_texts, load_heads, matrix
from tests.support.mtp_gguf import write_mtp_gguf
from tests.support.reference import rms_norm
from tests.support.tiny_dflash import (
    HEAD,
    MASK,
    N_COUNTED,
    N_HEAD,
    N_HEAD_KV,
    counted,
    write_counting_gguf,
    write_counting_head,
    write_tiny_dflash,
)
from tests.support.tiny_gguf import N_TINY, write_hybrid_gguf

# Variants of published heads, as llama.cpp's converter writes them.
DRAFTED = tuple(range(3, N_TINY, 3))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window in one layer": {
        "metadata": {
            "dflash.attention.sliding_window": 6,
            "dflash.attention.sliding_window_pattern": [True, False],
        }
    },
    "for a target that sees": {"metadata": {"dflash.rope.dimension_sections": [4, 0, 0, 0]}},
    "some tokens": {
        "tensors": {"d2t": np.array(DRAFTED, np.int64), "output.weight": matrix(len(DRAFTED), 32)}
    },
    "embeddings of its own": {"tensors": {"token_embd.weight": matrix(N_TINY, 32)}},
    "causal": {"metadata": {"dflash.attention.causal": True}},
}


# The block


def rotated(x: Floats) -> Floats:
    """Components i and i + size / 2 of each head rotated by position; x is (time, heads, size)."""
    half = x.shape[2] // 2
    speeds = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(len(x))[:, None, None] * speeds
    a, b = x[..., :half], x[..., half:]
    turned = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
    return np.concatenate(turned, axis=2).astype(np.float32)


def block_by_reference(w: Mapping[str, Floats], inputs: Floats, block: list[int]) -> Floats:
    """The logits of each row of a block; the text's auxiliary hidden states are (time, 3 * 32)."""
    features = rms_norm(inputs @ w["fc.weight"].T, w["enc.output_norm.weight"])
    x = w["token_embd.weight"][block]
    n, n_all = len(block), len(features) + len(block)
    for i in range(2):

        def weight(name: str, i: int = i) -> Floats:
            return w[f"blk.{i}.{name}.weight"]

        inner = np.concatenate([features, rms_norm(x, weight("attn_norm"))])
        projected: list[Floats] = [
            (inner @ weight(f"attn_{of}").T).reshape(n_all, -1, HEAD) for of in "qkv"
        ]
        q, k, v = projected
        q = rotated(rms_norm(q, weight("attn_q_norm")))[-n:]
        k = rotated(rms_norm(k, weight("attn_k_norm")))
        mixed = np.zeros((n, N_HEAD, HEAD), np.float32)
        for head in range(N_HEAD):
            kv_head = head // (N_HEAD // N_HEAD_KV)
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(HEAD)  # every row attends to all others
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
        x = x + mixed.reshape(n, -1) @ weight("attn_output").T
        normed = rms_norm(x, weight("ffn_norm"))
        gate = normed @ weight("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ weight("ffn_up").T)) @ weight("ffn_down").T
    return rms_norm(x, w["output_norm.weight"]) @ w["output.weight"].T


def test_a_block_matches_the_reference_after_prompts_of_different_lengths(
    tmp_path: Path, target: Path
) -> None:
    path = write_tiny_dflash(tmp_path / "head.gguf")
    file, of_target = GGUFFile(path), GGUFFile(target)
    w = {name: file.tensor(name) for name in file.tensors}
    w["token_embd.weight"] = of_target.tensor("token_embd.weight")
    w["output.weight"] = of_target.output_matrix()
    text = [*TEXT, 281, 282, 270]
    with Model(target) as model, Context(model, EXACT) as context:
        head = load_heads([path], model)["dflash"]
        head.start(EXACT, context)
        context.want_layers((1, 2, 3))
        output = context.decode(text_rows(text, 0, [True] * len(text)))
        inputs = np.stack([output.aux_hidden_states(row, (1, 2, 3)) for row in range(len(text))])
        context.want_layers(())
        levels = BlockContext(head)
        cache = SequenceCache(context)
        for n in (5, 7, 4):  # forward, and back
            levels.window, levels.depth = 64, 6
            context.seq_rm(-1, 0, -1)
            cache.tokens.clear()
            prefill(cache, text[: n - 1], reader=levels)
            root = run(levels.root(text[:n]))
            assert root is not None
            expected = block_by_reference(w, inputs[: n - 1], [text[n - 1], *[MASK] * 6])
            block = root[0].output  # type: ignore[attr-defined]
            for row in range(7):
                np.testing.assert_allclose(block.logits(row), expected[row], atol=1e-3)
        head.close()


def test_embedding_rows_have_a_position_on_every_axis() -> None:
    memory = BatchMemory(n_batch=4, n_seq_max=1)
    memory.fill(Rows([0, 0], [7, 8], [range(1)] * 2, [False] * 2, np.zeros((2, 3), np.float32)))
    assert memory.pos[:8].tolist() == [7, 8, 7, 8, 7, 8, 0, 0]


# A head that predicts its target well


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("counting")
    return (
        write_counting_gguf(folder / "target.gguf", influence=0.08),
        write_counting_head(folder / "head.gguf"),
    )


@pytest.fixture
def engine(counting: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine.load(counting[0], EXACT, heads=counting[1]) as made:
        yield made


def head_context(engine: Engine) -> BlockContext:
    head = engine.resources.heads["dflash"]
    levels: object = engine.resources.keep(("head context", head), lambda: None)
    assert isinstance(levels, BlockContext)
    return levels


def test_all_drafts_of_a_perfect_head_are_accepted(tmp_path: Path) -> None:
    target = write_counting_gguf(tmp_path / "target.gguf")
    head = write_counting_head(tmp_path / "head.gguf")
    with Engine.load(target, EXACT, heads=head) as engine:
        order = counted()
        text = [1, *order[:20]]
        reply = engine.generate(text, method="dflash", max_tokens=51).run()
        assert reply.token_ids == order[20:71]
        assert reply.stats.rows_histogram == {1 + N_COUNTED: 10, 1: 1}
        assert reply.stats.n_accepted == 40


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_accepted_and_rejected_drafts_leave_the_text_of_plain_decoding(
    engine: Engine, temperature: float
) -> None:
    methods = [f"dflash{more}" for more in ("", ":depth=2", ":window=0", ":window=3")]
    sampling = endless(engine, temperature)
    for text in ("abcdefgh", PROMPT, "a"):
        _, *texts = same_texts(
            engine, text, *methods, "dflash:top_k=3,nodes=9", sampling=sampling, max_tokens=80
        )
        for drafted in texts:
            assert 5 < drafted.stats.n_accepted < drafted.stats.n_drafted


def test_a_tree_of_the_likeliest_tokens_has_more_accepted_than_a_chain(engine: Engine) -> None:
    sampling = endless(engine, 0.7)
    chain, tree = (
        engine.generate("abc", method=method, sampling=sampling, max_tokens=100).run().stats
        for method in ("dflash", "dflash:top_k=4,nodes=16")
    )
    assert tree.n_accepted > chain.n_accepted
    assert max(tree.rows_histogram) == 17


def test_auto_uses_dflash_if_rows_are_cheap(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = Cost(CostCurve.linear(0.02, 6e-5))
    monkeypatch.setitem(engine.resources._kept, "cost", cost)
    settings = {"sampling": endless(engine), "max_tokens": 80}
    drafted = same_texts(engine, "abc", "auto:sources=dflash", **settings)[1]
    assert drafted.stats.accepted_by_source["dflash"] > 20


def test_the_target_context_is_recreated_for_wider_trees(engine: Engine) -> None:
    n_seq, methods = engine.context.n_seq_max, ("dflash", "dflash:top_k=12,nodes=100", "dflash")
    _, *texts = same_texts(engine, "abc", *methods, sampling=endless(engine), max_tokens=40)
    assert min(drafted.stats.n_accepted for drafted in texts) > 10
    assert engine.context.n_seq_max > n_seq


def test_the_heads_context_follows_the_text_over_several_turns(
    engine: Engine, counting: tuple[Path, Path]
) -> None:
    engine.generate([1], method="dflash", max_tokens=1).run()
    levels = head_context(engine)
    order, sampling = counted(), endless(engine)
    text: list[int] = [1, *order[:30]]
    for cut, new in ((None, [60, 61, 62]), (40, [9, 10]), (None, order[70:110]), (1, order[50:60])):
        text = [*text[:cut], *new]
        drafted = engine.generate(text, method="dflash", sampling=sampling, max_tokens=40).run()
        with Engine.load(counting[0], EXACT, heads=counting[1]) as fresh:
            alone = fresh.generate(text, method="dflash", sampling=sampling, max_tokens=40).run()
            plain = fresh.generate(text, method="ar", sampling=sampling, max_tokens=40).run()
        assert drafted.token_ids == alone.token_ids == plain.token_ids
        assert drafted.stats.rows_histogram == alone.stats.rows_histogram
        assert drafted.stats.n_accepted == alone.stats.n_accepted > 0
        # Every token but those of the last step has exactly one row.
        assert levels._positions == list(range(len(levels._positions)))
        assert len(levels._positions) >= len(text) + 40 - 1 - (1 + N_COUNTED)
        text = [*text, *drafted.token_ids]


def test_the_heads_context_lacks_only_what_other_methods_generated(engine: Engine) -> None:
    sampling = endless(engine)
    text: list[int] = [1, *counted()[:30]]
    for method in ("dflash", "ar", "prompt-lookup", "dflash"):
        reply = engine.generate(text, method=method, sampling=sampling, max_tokens=100).run()
        text = [*text, *reply.token_ids, 60]
    missing = set(range(len(text) - 6)) - {*head_context(engine)._positions}
    assert 100 < len(missing) < 240  # of 202; up to 64 are decoded again
    assert max(missing) < 31 + 303
    assert reply.stats.n_accepted > 0


def test_a_prompt_is_decoded_in_full_batches(counting: tuple[Path, Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    text = (counted() * 2)[:420]
    params = replace(EXACT, n_batch=128)
    with Engine.load(counting[0], params, heads=counting[1], trace_batches=trace) as engine:
        reply = engine.generate(text, method="dflash", sampling=endless(engine), max_tokens=20)
        assert reply.run().stats.n_accepted > 0
    n_rows = [line.count("[[") + line.count("],[") for line in trace.read_text().splitlines()]
    assert n_rows[:4] == [128, 128, 128, 35]


def test_a_full_head_context_ends_drafting_but_not_the_text(counting: tuple[Path, Path]) -> None:
    params = replace(EXACT, n_ctx=256)
    with Engine.load(counting[0], params, heads=counting[1]) as engine:
        _, drafted = same_texts(engine, counted()[:200], "dflash", sampling=endless(engine))
        assert (drafted.finish_reason, len(drafted.token_ids)) == ("context", 57)


# Any head

METHODS = (
    "dflash",
    "dflash:depth=3",
    "dflash:top_k=3,nodes=12,depth=5",
    "dflash:window=0,p_min=0.1",
    "auto:sources=dflash",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_head_gives_the_text_of_plain_decoding(
    tmp_path: Path, target: Path, variant: str
) -> None:
    path = write_tiny_dflash(tmp_path / "head.gguf", **VARIANTS[variant])
    with Engine.load(target, EXACT, heads=path) as engine:
        found = check_texts(engine, METHODS)
        n_drafts = engine.resources.heads["dflash"].n_drafts
        assert max(found["dflash"].rows_histogram) == 1 + n_drafts
        assert max(found["dflash:depth=3"].rows_histogram) == 4
        assert max(found["dflash:top_k=3,nodes=12,depth=5"].rows_histogram) == 13


@pytest.mark.parametrize("write", [write_hybrid_gguf, write_mtp_gguf], ids=["lfm2", "qwen35"])
def test_a_hybrid_target_gets_chains_only(tmp_path: Path, write: Any) -> None:
    target = write(tmp_path / "target.gguf")
    path = write_tiny_dflash(tmp_path / "head.gguf", layers=(0, 1, 2), block_size=12)
    with Engine.load(target, EXACT, heads=path, mtp=False) as engine:
        found = check_texts(engine, METHODS)
        assert max(found["dflash"].rows_histogram) == 1 + engine.context.n_rewind


def test_drafts_for_a_hybrid_target_are_accepted_over_several_turns(tmp_path: Path) -> None:
    target = write_counting_gguf(tmp_path / "target.gguf", influence=0.02, hybrid=True)
    head = write_counting_head(tmp_path / "head.gguf")
    with Engine.load(target, EXACT, heads=head) as engine, Engine.load(target, EXACT) as plain:
        text, n_reused = [1, *counted()[:30]], []
        for cut, temperature in ((None, 0.0), (None, 0.7), (-30, 0.0), (40, 0.7), (None, 0.0)):
            text = [*text[:cut], 60, 61, 62]
            sampling = endless(engine, temperature)
            drafted = engine.generate(text, method="dflash", sampling=sampling, max_tokens=40).run()
            plain.cache.truncate(0)
            expected = plain.generate(text, method="ar", sampling=sampling, max_tokens=40).run()
            assert drafted.token_ids == expected.token_ids
            assert 5 < drafted.stats.n_accepted < drafted.stats.n_drafted
            n_reused.append(drafted.stats.n_reused)
            text = [*text, *drafted.token_ids]
        assert max(n_reused) > 60
