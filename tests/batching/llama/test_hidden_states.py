"""Hidden states: given on request for any batch, at no cost to others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from batching.cache import SequenceCache
from batching.errors import UnsupportedModel
from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import Rows, text_rows, tree_rows
from batching.together import run
from batching.tree import Floats, TokenTree
from tests.support.exact import EXACT


@pytest.fixture
def context(tiny_model: Path) -> Iterator[Context]:
    with Model(tiny_model) as model, Context(model, EXACT) as context:
        yield context


def chain(tokens: list[int], outputs: list[bool], n_past: int = 0) -> Rows:
    n = len(tokens)
    return Rows(tokens, range(n_past, n_past + n), [range(1)] * n, outputs)


def output_matrix(path: Path) -> Floats:
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    return np.array(tensors["output.weight"])


def test_the_output_matrix_maps_a_hidden_state_to_the_logits(
    context: Context, tiny_model: Path
) -> None:
    context.want_hidden(True)
    output = context.decode(chain([5, 270, 271], [False, True, True]))
    matrix = output_matrix(tiny_model)
    for row in range(3):  # rows without requested output have output too
        assert output.hidden(row).shape == (32,)
        np.testing.assert_allclose(matrix @ output.hidden(row), output.logits(row), atol=1e-4)


def test_hidden_states_are_given_for_batches_of_any_size(
    context: Context, tiny_model: Path
) -> None:
    matrix = output_matrix(tiny_model)
    n_past = 0
    for turn, n in enumerate((1, 100, 3, 7, 1, 120)):
        context.want_hidden(turn % 2 == 0)
        output = context.decode(chain([260 + i % 30 for i in range(n)], [True] * n, n_past))
        n_past += n
        if turn % 2 == 0:
            np.testing.assert_allclose(
                matrix @ output.hidden(n - 1), output.logits(n - 1), atol=1e-4
            )
        else:
            with pytest.raises(RuntimeError, match="were not requested"):
                output.hidden(n - 1)


def test_output_rows_of_a_tree_count_from_its_root(context: Context, tiny_model: Path) -> None:
    matrix = output_matrix(tiny_model)
    tree = TokenTree(5)
    tree.add_chain(0, [270, 271])
    tree.add(0, 272, output=False)
    cache = SequenceCache(context)
    cache.reserve(3)
    cache.prefill([6, 7])
    alone = context.decode(tree_rows(tree, cache.n_past, cache.n_seq))
    expected = [alone.logits(row).copy() for row in range(3)]
    cache.truncate(0)
    cache.prefill([6, 7], defer=True)
    assert cache.n_deferred == 2
    output = context.decode(cache.with_deferred(tree_rows(tree, cache.n_past, cache.n_seq)))
    for row in range(3):
        np.testing.assert_allclose(output.logits(row), expected[row], atol=1e-4)
        assert output.argmax(row) == expected[row].argmax()
    assert output.argmaxes(0, 3) == [logits.argmax() for logits in expected]
    assert output.argmaxes(1, 0) == []
    with pytest.raises(IndexError, match="row 3 of this batch has no output"):
        output.logits(3)
    context.seq_rm(-1, 0, -1)
    context.want_hidden(True)
    output = context.decode(text_rows([6, 7, 5, 270], 0, [True] * 4))
    for row in range(4):
        np.testing.assert_allclose(matrix @ output.hidden(row), output.logits(row), atol=1e-4)


def test_prefill_computes_no_output_once_hidden_states_are_turned_off(
    context: Context,
) -> None:
    context.want_hidden(True)
    context.decode(chain([5], [True]))
    context.want_hidden(False)
    cache = SequenceCache(context)
    output = context.decode(chain([6, 7], [False, True], 1))
    with pytest.raises(IndexError, match="row 0 of this batch has no output"):
        output.logits(0)
    cache.truncate(0)
    cache.prefill([5, 6, 7])
    again = run(cache.extend([8])).logits(0).copy()
    cache.truncate(0)
    context.want_hidden(True)
    cache.prefill([5, 6, 7])
    np.testing.assert_array_equal(run(cache.extend([8])).logits(0), again)


def test_hidden_states_wider_than_the_model_are_refused(context: Context) -> None:
    """DeepSeek 4 has them; llama.cpp would abort the process."""
    context.model.n_embd_out = 4 * context.model.n_embd
    with pytest.raises(UnsupportedModel, match=r"hidden states of .*so heads cannot draft for it"):
        context.want_hidden(True)
    context.want_hidden(False)
    assert context.decode(chain([5], [True])).argmax(0) >= 0
