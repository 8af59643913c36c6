"""DFlash: the block, a head that predicts well, and what its context holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from tests.support.exact import EXACT, endless, same_texts
from tests.support.fake_target import prefill
from tests.support.head_checks import TEXT, load_heads
from tests.support.reference import layer, rms_norm
from tests.support.tiny_heads import (
    MASK,
    N_COUNTED,
    blocks,
    counted,
    write_counting_gguf,
    write_counting_head,
    write_tiny_dflash,
)

# The block


def block_by_reference(w: Mapping[str, Floats], inputs: Floats, block: list[int]) -> Floats:
    """The logits of each row of a block; the text's auxiliary hidden states are (time, 3 * 32)."""
    features = rms_norm(inputs @ w["fc.weight"].T, w["enc.output_norm.weight"])
    x = w["token_embd.weight"][block]
    for i in range(2):
        normed = rms_norm(x, w[f"blk.{i}.attn_norm.weight"])
        x = layer(w, np.concatenate([features, normed]), x, i, causal=False)
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
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    target, heads, _ = blocks(tmp_path_factory.mktemp("counting"))
    return partial(Engine.load, target, heads=heads)


@pytest.fixture
def engine(load: Callable[..., Engine]) -> Iterator[Engine]:
    with load(EXACT) as made:
        yield made


def head_context(engine: Engine) -> BlockContext:
    seat = engine.resources.seat
    levels: object = seat.head_contexts[seat.heads["dflash"]]
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
    monkeypatch.setattr(engine.resources.kept, "cost", cost)
    settings = {"sampling": endless(engine), "max_tokens": 80}
    drafted = same_texts(engine, "abc", "auto:sources=dflash", **settings)[1]
    assert drafted.stats.accepted_by_source["dflash"] > 20


def test_the_heads_context_follows_the_text_over_several_turns(
    engine: Engine, load: Callable[..., Engine]
) -> None:
    engine.generate([1], method="dflash", max_tokens=1).run()
    levels = head_context(engine)
    order, sampling = counted(), endless(engine)
    text: list[int] = [1, *order[:30]]
    for cut, new in ((None, [60, 61, 62]), (40, [9, 10]), (None, order[70:110]), (1, order[50:60])):
        text = [*text[:cut], *new]
        drafted = engine.generate(text, method="dflash", sampling=sampling, max_tokens=40).run()
        with load(EXACT) as fresh:
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


def test_a_prompt_is_decoded_in_full_batches(load: Callable[..., Engine], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    text = (counted() * 2)[:420]
    with load(replace(EXACT, n_batch=128), trace_batches=trace) as engine:
        reply = engine.generate(text, method="dflash", sampling=endless(engine), max_tokens=20)
        assert reply.run().stats.n_accepted > 0
    n_rows = [line.count("[[") + line.count("],[") for line in trace.read_text().splitlines()]
    assert n_rows[:4] == [128, 128, 128, 35]
