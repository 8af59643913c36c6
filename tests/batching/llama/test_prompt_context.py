"""Prompts read in a context of their own, on a random model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from batching.cache import Reading, SequenceCache
from batching.llama.context import Context
from batching.llama.model import Model
from batching.prompt_context import PromptContext
from batching.rows import text_rows
from batching.slots import Slots
from tests.support.exact import EXACT
from tests.support.fake_target import prefill

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


def test_what_is_read_apart_in_turns_is_as_if_read_in_place(
    contexts: tuple[Context, Context],
) -> None:
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
