"""Texts of a model with a sliding window that are cut, copied and shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from batching.cache import SequenceCache
from batching.llama.context import Context
from batching.llama.model import Model
from batching.prompt_context import PromptContext
from batching.rows import text_rows
from batching.slots import Slots
from tests.support.exact import EXACT
from tests.support.fake_target import prefill
from tests.support.tiny_gguf import write_window_gguf

TEXT, OTHER = ([9 + i * step % 280 for i in range(300)] for step in (7, 11))
SIZES = replace(EXACT, n_ctx=512, n_seq_max=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_window_gguf(tmp_path_factory.mktemp("models") / "window.gguf", n_window=64)
    with Model(path) as model:
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, SIZES) as context:
        yield context


def logits_after(context: Context, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Those of the last token, the text read from its beginning."""
    context.seq_rm(-1, 0, -1)
    cache = SequenceCache(context)
    prefill(cache, tokens[:-1])
    return np.array(context.decode_row(tokens[-1], cache.n_past, range(1)).logits(0))


@pytest.mark.parametrize("n_kept", [300, 299, 200, 192, 65, 64, 20])
def test_a_copy_can_be_cut_anywhere(context: Context, model: Model, n_kept: int) -> None:
    assert (context.n_seq_max, model.n_window) == (4, 64)
    expected = logits_after(context, [*TEXT[:n_kept], 5])
    context.seq_rm(-1, 0, -1)
    prefill(SequenceCache(context), TEXT)
    state = context.copy_out(0)
    with Context(model, SIZES) as other:
        prefill(SequenceCache(other), OTHER[:100])
        assert other.copy_in(2, state)
        other.seq_rm(2, n_kept, -1)
        rows = text_rows([5], n_kept, [True])
        rows.seq_ids = [range(2, 3)]
        np.testing.assert_allclose(other.decode(rows).logits(0), expected, atol=1e-4)


def test_a_copy_that_does_not_fit_leaves_the_sequence_empty(context: Context, model: Model) -> None:
    prefill(SequenceCache(context), TEXT)
    state = context.copy_out(0)
    with Context(model, replace(SIZES, n_ctx=256)) as small:
        assert not small.copy_in(0, state)
        found = logits_after(small, TEXT[:100])
    np.testing.assert_allclose(found, logits_after(context, TEXT[:100]), atol=1e-4)


@pytest.mark.parametrize(("n_seq", "n_kept"), [(1, 0), (2, 100)])
def test_cells_that_one_sequence_alone_has_may_be_lost_and_then_it_is_read_anew(
    context: Context, n_seq: int, n_kept: int
) -> None:
    expected = logits_after(context, [*OTHER[:100], 5])
    context.seq_rm(-1, 0, -1)
    slots = Slots(context, 2).slots
    first, second = (SequenceCache(slot) for slot in slots)
    prefill(first, TEXT[:200])
    second.reserve(n_seq)
    prefill(second, OTHER[:200])
    first.truncate(100)
    prefill(first, TEXT[:250])  # into the cells that are free, and then on into the next ones
    assert slots[1].has_window(0, 200)
    assert second.n_kept(OTHER[:100]) == n_kept
    assert prefill(second, OTHER[:100]) == n_kept
    found = slots[1].decode(text_rows([5], 100, [True], n_seq)).logits(0)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_prompts_longer_than_the_window_are_read_in_a_context_of_their_own(
    context: Context, model: Model
) -> None:
    expected = logits_after(context, [*TEXT, 5])
    context.seq_rm(-1, 0, -1)
    slots = Slots(context, 2)
    with Context(model, replace(SIZES, n_seq_max=2)) as small:
        prompts = PromptContext(small, context)
        for slot in slots.slots:
            for first, end in ((0, 150), (150, 300)):
                rows = text_rows(TEXT[first:end], first, [False] * 150)
                assert prompts.read(TEXT, slot, rows)
            found = slot.decode(text_rows([5], 300, [True])).logits(0)
            np.testing.assert_allclose(found, expected, atol=1e-4)
            slot.seq_rm(-1, 0, -1)
        assert prompts.read(OTHER, slots.slots[0], text_rows(OTHER, 0, [False] * 300))
        assert prompts.read(TEXT, slots.slots[1], text_rows(TEXT[:200], 0, [False] * 200))
