"""A context: how long it may be, when flash attention is on, and its hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.cache import SequenceCache
from batching.errors import InvalidParameter, UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context, ContextParams
from batching.llama.context_params import KV_TYPES
from batching.llama.create import max_tokens
from batching.llama.devices import CacheSize
from batching.llama.model import Model
from batching.rows import text_rows, tree_rows
from batching.slots import Slots
from batching.together import run
from batching.tree import Floats, TokenTree
from speculation.engine import Engine
from speculation.registry import resolve
from tests.support.exact import EXACT
from tests.support.fake_target import prefill
from tests.support.tiny_gguf import write_recurrent_gguf, write_tiny_gguf


def test_a_context_longer_than_a_model_was_trained_for_is_refused(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        with pytest.raises(InvalidParameter) as refused:
            Context(model, replace(EXACT, n_ctx=200_000))
        assert str(refused.value) == (
            f"a context of 200,000 tokens is too long for {tiny_model}, which was trained for 512; "
            "lower n_ctx to 512 or less"
        )
        with pytest.raises(InvalidParameter, match="for 512, in each of 3 texts; lower n_ctx to 1"):
            Context(model, replace(EXACT, n_ctx=2000, n_slots=3))
        for n_ctx, n_slots, n_cells in ((512, 1, 512), (0, 1, 512), (1536, 3, 1536)):
            with Context(model, replace(EXACT, n_ctx=n_ctx, n_slots=n_slots)) as context:
                assert context.n_ctx == n_cells
        with Context(model, replace(EXACT, flash_attn="auto")) as context:
            assert context.flash_attn


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 512),
        ({"type": "none", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 8.0, "original_context_length": 128}, 1024),
        ({"type": "longrope", "original_context_length": 128}, 512),
    ],
)
def test_rope_scaling_lengthens_what_a_model_can_read(
    scaling: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    def add(writer: Any) -> None:
        for name, value in scaling.items():
            key = f"llama.rope.scaling.{name}"
            kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            kinds[type(value)](key, value)

    with Model(write_tiny_gguf(tmp_path / "tiny.gguf", more=add)) as model:
        assert max_tokens(model) == longest
        with Context(model, replace(EXACT, n_ctx=longest)) as context:
            assert context.n_ctx == longest
        with pytest.raises(InvalidParameter, match=f"for {longest:,}; lower n_ctx"):
            Context(model, replace(EXACT, n_ctx=longest + 1))


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_token_takes_as_much_memory_as_its_type_of_cache_is_said_to(kv_type: str) -> None:
    params = ContextParams(256, 64, kv_type=kv_type, flash_attn="on", n_threads=1)
    with Model(resolve("bundled")) as bundled, Context(bundled, params) as context:
        sizes = []
        for n in (32, 64):
            context.seq_rm(-1, 0, -1)
            context.decode(text_rows([5] * n, 0, [False] * (n - 1) + [True]))
            sizes.append(len(context.copy_out(0)))
        expected = CacheSize(32, kv_type).n_bytes(sum(bundled.kv_values))
    assert sizes[1] - sizes[0] == pytest.approx(expected, rel=0.01)  # and its position


def test_a_recurrent_model_has_one_state(tmp_path: Path) -> None:
    path = write_recurrent_gguf(tmp_path / "recurrent.gguf")
    with Engine.load(path, ContextParams(n_ctx=256)) as engine:
        assert engine.context.n_seq_max == 1  # 64 recurrent states would take gigabytes
        assert engine.generate("the cat", max_tokens=4).run().stats.n_tokens == 4


@pytest.fixture
def context(tiny_model: Path) -> Iterator[Context]:
    with Model(tiny_model) as model, Context(model, EXACT) as context:
        yield context


def output_matrix(path: Path) -> Floats:
    return GGUFFile(path).output_matrix()


def test_hidden_states_are_given_on_request_for_batches_of_any_size(
    context: Context, tiny_model: Path
) -> None:
    matrix, n_past = output_matrix(tiny_model), 0
    for turn, n in enumerate((1, 100, 3, 7, 1, 120)):
        context.want_hidden(turn % 2 == 0)
        outputs = [n != 3] * (n - 1) + [True]
        output = context.decode(text_rows([260 + i % 30 for i in range(n)], n_past, outputs))
        n_past += n
        if turn % 2:
            with pytest.raises(RuntimeError, match="were not requested"):
                output.hidden(n - 1)
            continue
        for row in {0, n - 1}:  # rows without requested output have output too
            hidden = output.hidden(row)
            assert hidden.shape == (32,)
            np.testing.assert_allclose(matrix @ hidden, output.logits(row), atol=1e-4)


def test_output_rows_of_a_tree_count_from_its_root(context: Context, tiny_model: Path) -> None:
    matrix = output_matrix(tiny_model)
    tree = TokenTree(5)
    tree.add_chain(0, [270, 271])
    tree.add(0, 272, output=False)
    (slot,) = Slots(context, 1).slots
    cache = SequenceCache(slot)
    cache.reserve(3)
    prefill(cache, [6, 7])
    alone = slot.decode(tree_rows(tree, cache.n_past, cache.n_seq))
    expected = [alone.logits(row).copy() for row in range(3)]
    cache.truncate(0)
    prefill(cache, [6, 7], defer=True)
    assert cache.n_deferred == 2
    output = slot.decode(cache.with_deferred(tree_rows(tree, cache.n_past, cache.n_seq)))
    for row in range(3):
        np.testing.assert_allclose(output.logits(row), expected[row], atol=1e-4)
        assert output.argmax(row) == expected[row].argmax()
    assert output.argmaxes(0, 3) == [logits.argmax() for logits in expected]
    assert output.argmaxes(1, 0) == []
    with pytest.raises(IndexError, match="row 5 of this batch has no output"):
        output.logits(3)
    context.seq_rm(-1, 0, -1)
    context.want_hidden(True)
    output = context.decode(text_rows([6, 7, 5, 270], 0, [True] * 4))
    for row in range(4):
        np.testing.assert_allclose(matrix @ output.hidden(row), output.logits(row), atol=1e-4)


def test_prefill_computes_no_output_once_hidden_states_are_turned_off(context: Context) -> None:
    context.want_hidden(True)
    context.decode(text_rows([5], 0, [True]))
    context.want_hidden(False)
    cache = SequenceCache(context)
    output = context.decode(text_rows([6, 7], 1, [False, True]))
    with pytest.raises(IndexError, match="row 0 of this batch has no output"):
        output.logits(0)
    cache.truncate(0)
    prefill(cache, [5, 6, 7])
    again = run(cache.extend([8])).logits(0).copy()
    cache.truncate(0)
    context.want_hidden(True)
    prefill(cache, [5, 6, 7])
    np.testing.assert_array_equal(run(cache.extend([8])).logits(0), again)


def test_hidden_states_wider_than_the_model_are_refused(context: Context) -> None:
    """DeepSeek 4 has them; llama.cpp would abort the process."""
    context.model.n_embd_out = 4 * context.model.n_embd
    with pytest.raises(UnsupportedModel, match=r"hidden states of .*so heads cannot draft for it"):
        context.want_hidden(True)
    context.want_hidden(False)
    assert context.decode(text_rows([5], 0, [True])).argmax(0) >= 0
