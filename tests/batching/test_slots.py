"""Several texts in one target: slots on the fake target, which checks llama.cpp's rules."""

from __future__ import annotations

import numpy as np

from batching.cache import Reading, SequenceCache
from batching.rows import Row, tree_rows
from batching.slots import Slots
from batching.tree import TokenTree
from tests.support.fake_target import FakeTarget, fake_logits


def branching(root: int) -> TokenTree:
    """The root with children 10 and 11; 12 is below 10."""
    tree = TokenTree(root)
    left = tree.add(0, 10)
    tree.add(0, 11)
    tree.add(left, 2)
    return tree


def test_trees_of_two_texts_are_decoded_together_and_committed_apart() -> None:
    target = FakeTarget(n_seq_max=8)
    shared = Slots(target, 2)
    caches = [SequenceCache(slot) for slot in shared.slots]
    for cache, text in zip(caches, ([1, 2], [3, 4, 5]), strict=True):
        cache.prefill(text)
        cache.reserve(3)
    trees = [branching(6), branching(7)]
    parts = [tree_rows(tree, c.n_past, c.n_seq) for tree, c in zip(trees, caches, strict=True)]
    outputs = shared.decode(list(zip(shared.slots, parts, strict=True)))
    assert list(target.decoded[-1]) == [
        Row(6, 2, (0, 1, 2), True),
        Row(10, 3, (1,), True),
        Row(11, 3, (2,), True),
        Row(2, 4, (1,), True),
        Row(7, 3, (4, 5, 6), True),
        Row(10, 4, (5,), True),
        Row(11, 4, (6,), True),
        Row(2, 5, (5,), True),
    ]
    np.testing.assert_array_equal(outputs[0].logits(3), fake_logits((1, 2, 6, 10, 2)))
    np.testing.assert_array_equal(outputs[1].logits(2), fake_logits((3, 4, 5, 7, 11)))
    caches[0].commit(parts[0], [0, 1, 3])
    caches[1].commit(parts[1], [0, 2])
    sequences = [target.tokens_of(seq_id) for seq_id in range(8)]
    assert sequences == [[1, 2, 6, 10, 2]] * 3 + [[]] + [[3, 4, 5, 7, 11]] * 3 + [[]]
    caches[0].truncate(0)
    assert target.tokens_of(0) == []
    assert target.tokens_of(4) == [3, 4, 5, 7, 11]


def test_a_prompt_is_read_in_the_batches_of_another_text() -> None:
    target = FakeTarget(n_seq_max=4)
    shared = Slots(target, 2)
    writing, other = (SequenceCache(slot) for slot in shared.slots)
    writing.prefill([1, 2])
    reading = Reading(other, [3, 4, 5, 6, 7], defer=True)
    for token, n_read in ((8, 2), (9, 4)):
        chunk = reading.next_rows(2)
        rows = tree_rows(TokenTree(token), writing.n_past, writing.n_seq)
        assert chunk is not None
        output, read = shared.decode([(shared.slots[0], rows), (shared.slots[1], chunk)])
        np.testing.assert_array_equal(output.logits(0), fake_logits((*writing.tokens, token)))
        reading.take(read)
        writing.commit(rows, [0])
        assert target.tokens_of(2) == [3, 4, 5, 6, 7][:n_read]
    assert reading.next_rows(2) is None  # the last token waits for the first tree
    rows = tree_rows(TokenTree(8), other.n_past, other.n_seq)
    (output,) = shared.decode([(shared.slots[1], other.with_deferred(rows))])
    np.testing.assert_array_equal(output.logits(0), fake_logits((3, 4, 5, 6, 7, 8)))


def test_a_slot_takes_over_the_beginning_of_another_text() -> None:
    target = FakeTarget(n_seq_max=4)
    shared = Slots(target, 2)
    first, second = (SequenceCache(slot) for slot in shared.slots)
    first.prefill([1, 2, 3, 4])
    shared.slots[1].share(shared.slots[0], 3)
    second.tokens = [1, 2, 3]
    assert second.prefill([1, 2, 3, 9]) == 3
    assert [row.token for row in target.decoded[-1]] == [9]
    assert (target.tokens_of(0), target.tokens_of(2)) == ([1, 2, 3, 4], [1, 2, 3, 9])
    assert target.n_cells() == 5


def test_slots_want_what_any_of_them_wants() -> None:
    class Wanting(FakeTarget):
        def want_hidden(self, wanted: bool) -> None:
            self.hidden = wanted

        def want_layers(self, layers: object) -> None:
            self.layers = layers

        def want_logits(self, wanted: bool) -> None:
            self.logits = wanted

    target = Wanting(n_seq_max=4)
    one, other = Slots(target, 2).slots
    one.want_hidden(True)
    one.want_layers((3, 1))
    other.want_layers((2, 1))
    other.want_hidden(False)
    other.want_logits(True)
    one.want_logits(False)
    assert (target.hidden, target.layers, target.logits) == (True, (1, 2, 3), True)
    other.want_logits(False)
    assert not target.logits
    one.want_hidden(False)
    one.want_layers(())
    assert (target.hidden, target.layers) == (False, (1, 2))
