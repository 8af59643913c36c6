"""Prompts read in a context of their own, and texts with a sliding window cut and copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from batching.cache import Reading, SequenceCache
from batching.llama.context import Context
from batching.llama.model import Model
from batching.prompt_context import PromptContext
from batching.rows import text_rows
from batching.slots import Slots
from tests.support.exact import EXACT
from tests.support.fake_target import prefill
from tests.support.tiny_gguf import write_window_gguf

FIRST, SECOND = ([9 + i * step % 80 for i in range(100)] for step in (1, 3))


@pytest.fixture
def contexts(tiny_model: Path) -> Iterator[tuple[Context, Context]]:
    small = replace(EXACT, n_ctx=256, n_seq_max=2)
    with (
        Model(tiny_model) as model,
        Context(model, replace(EXACT, n_ctx=512, n_seq_max=8)) as shared,
        Context(model, small) as own,
    ):
        yield shared, own


def test_what_is_read_apart_is_as_if_read_in_place(contexts: tuple[Context, Context]) -> None:
    context, own = contexts
    slots, prompts = Slots(context, 3), PromptContext(own, context)
    caches = [SequenceCache(slot) for slot in slots.slots]
    prefill(caches[2], FIRST)
    slots.slots[1].share(slots.slots[2], 40)
    caches[1].tokens = FIRST[:40]
    readings = [Reading(caches[0], SECOND), Reading(caches[1], FIRST)]
    assert [reading.n_left for reading in readings] == [100, 60]
    while any(reading.n_left for reading in readings):
        for prompt, reading, slot in zip((SECOND, FIRST), readings, slots.slots, strict=False):
            if (rows := reading.next_rows(30)) is not None:
                assert prompts.read(prompt, slot, rows)
                reading.take(None)
    assert [cache.tokens for cache in caches] == [SECOND, FIRST, FIRST]
    parts = [
        (slot, text_rows([7], cache.n_past, [True]))
        for slot, cache in zip(slots.slots, caches, strict=True)
    ]
    found = [output.logits(0).copy() for output in slots.decode(parts)]
    context.seq_rm(-1, 0, -1)
    for prompt, logits in zip((SECOND, FIRST, FIRST), found, strict=True):
        caches[0].tokens = []
        prefill(caches[0], prompt)
        alone = slots.decode([(slots.slots[0], text_rows([7], 100, [True]))])[0].logits(0)
        np.testing.assert_allclose(logits, alone, atol=1e-5)
        context.seq_rm(-1, 0, -1)


def test_a_beginning_is_kept_for_a_prompt_that_shares_it_and_for_no_other(
    contexts: tuple[Context, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, own = contexts
    slot = Slots(context, 2).slots[0]
    prompts, cache = PromptContext(own, context), SequenceCache(slot)
    copy_in = mock.Mock(wraps=own.copy_in)
    monkeypatch.setattr(own, "copy_in", copy_in)
    for begin, n_copied in ((FIRST[:50], 1), (FIRST[:30], 1), (FIRST[:30], 1), (SECOND[:30], 2)):
        prompt = [*begin, *SECOND[50:60]]
        cache.truncate(0)
        prefill(cache, begin)
        assert prompts.read(prompt, slot, text_rows(prompt[-10:], len(begin), [False] * 10))
        cache.tokens = list(prompt)
        assert copy_in.call_count == n_copied
        parts = [text_rows([7], len(prompt), [True])]
        found = slot.decode(parts[0]).logits(0).copy()
        cache.truncate(0)
        prefill(cache, prompt)
        np.testing.assert_allclose(found, slot.decode(parts[0]).logits(0), atol=1e-5)


def test_without_room_a_slot_stays_as_it_was(contexts: tuple[Context, Context]) -> None:
    context, own = contexts
    slots, prompts = Slots(context, 2), PromptContext(own, context)
    full, other = (SequenceCache(slot) for slot in slots.slots)
    prefill(full, [5 + i % 90 for i in range(400)])
    prefill(other, FIRST[:50])
    prompt, rows = [*FIRST[:50], *SECOND], text_rows(SECOND, 50, [False] * 100)
    assert not prompts.read(prompt, slots.slots[1], rows)
    slots.decode([(slots.slots[1], text_rows([7], 50, [True]))])
    full.truncate(100)
    other.truncate(50)
    assert prompts.read(prompt, slots.slots[1], rows)


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
def test_lost_cells_are_read_anew(context: Context, n_seq: int, n_kept: int) -> None:
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


def test_long_prompts_are_read_in_a_context_of_their_own(context: Context, model: Model) -> None:
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
