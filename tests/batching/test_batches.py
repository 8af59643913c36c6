"""Trees, rows, the sequence cache and slots, with literal tables."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batching.cache import Reading, SequenceCache, n_kept, worth_saving
from batching.errors import PromptTooLong, TreeError
from batching.llama.batch import BatchMemory
from batching.llama.model import size_name
from batching.rows import Rows, n_sequences, rows_back, tree_rows
from batching.slots import Slots
from batching.target import Cancelled
from batching.tree import TokenTree
from speculation.methods.eagle import parse_choices
from tests.support.fake_target import FakeTarget, Row, fake_logits, listed, prefill


def branching_tree(root: int = 10) -> TokenTree:
    """root -> 11 -> 12 | 13, and root -> 14."""
    tree = TokenTree(root)
    a = tree.add(0, 11)
    tree.add(a, 12)
    tree.add(a, 13)
    tree.add(0, 14)
    return tree


def chain_of(root: int, *drafts: int) -> TokenTree:
    tree = TokenTree(root)
    tree.add_chain(0, drafts)
    return tree


def test_a_root_and_a_chain_join_every_sequence_and_branches_share_only_their_ancestors() -> None:
    assert listed(tree_rows(TokenTree(7), n_past=5, n_seq=3)) == [Row(7, 5, (0, 1, 2), True)]
    assert listed(tree_rows(chain_of(7, 8, 9), n_past=5, n_seq=2)) == [
        Row(7, 5, (0, 1), True),
        Row(8, 6, (0, 1), True),
        Row(9, 7, (0, 1), True),
    ]
    assert listed(tree_rows(branching_tree(), n_past=100, n_seq=5)) == [
        Row(10, 100, (0, 1, 2, 3, 4), True),
        Row(11, 101, (1, 2), True),
        Row(12, 102, (1,), True),
        Row(13, 102, (2,), True),
        Row(14, 101, (3,), True),
    ]


def attention_mask(rows: Rows) -> list[str]:
    """Which rows of the batch each row attends to, by llama.cpp's rule: those that share one of its
    sequences and do not come after it. All sequences of a row must agree."""
    mask: list[str] = []
    all_rows = listed(rows)
    for row in all_rows:
        lines = {
            "".join(
                "1" if seq in other.seq_ids and other.position <= row.position else "."
                for other in all_rows
            )
            for seq in row.seq_ids
        }
        assert len(lines) == 1, f"{row} attends to different rows in its sequences"
        mask += lines
    return mask


def test_the_attention_mask_of_medusas_example_tree() -> None:
    """Paths 0.0.0.0, 0.1.0, 1.0 and 1.1: each node sees the root, its ancestors and itself."""
    tree = TokenTree(1)
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for path in parse_choices("0.0.0.0/0.1.0/1.0/1.1"):
        nodes[path] = tree.add(nodes[path[:-1]], 10 * len(path) + path[-1], merge=False)
    # Rows: root, 0, 1, 0.0, 0.1, 1.0, 1.1, 0.0.0, 0.1.0, 0.0.0.0.
    assert attention_mask(tree_rows(tree, n_past=100, n_seq=8)) == [
        "1.........",
        "11........",
        "1.1.......",
        "11.1......",
        "11..1.....",
        "1.1..1....",
        "1.1...1...",
        "11.1...1..",
        "11..1...1.",
        "11.1...1.1",
    ]


def test_rows_of_trees_are_numbered_and_held_by_the_batch_memory() -> None:
    tree = TokenTree(1)
    for tokens in ([2, 3], [4], [2, 5]):
        tree.add_chain(0, tokens)
    seq_ids = [row.seq_ids for row in listed(tree_rows(tree, 0, 4))]
    assert seq_ids == [(0, 1, 2, 3), (1, 2), (1,), (3,), (2,)]  # of the tokens 1, 2, 3, 4, 5
    tree = branching_tree()
    for branches, expected in (
        ([4, 3], [(0, 1, 2, 3), (2, 3), (3,), (2,), (1,)]),
        ([3, 4], [(0, 1, 2, 3), (1, 2), (2,), (1,), (3,)]),  # those through node 1 stay together
    ):
        tree.branches = branches
        assert [row.seq_ids for row in listed(tree_rows(tree, 0, 4))] == expected
    memory = BatchMemory(n_batch=8, n_seq_max=5)
    first, other, chain = branching_tree(), branching_tree(), chain_of(7, 8, 9)
    other.branches = [4, 3]
    for tree in (first, first, TokenTree(7), chain, first, other, other, first, chain, first):
        rows = tree_rows(tree, n_past=100, n_seq=5)
        memory.fill(rows)
        batch = memory.struct
        assert batch.n_tokens == len(rows)
        for i, row in enumerate(listed(rows)):
            ids = tuple(batch.seq_id[i][: batch.n_seq_id[i]])
            assert row == Row(batch.token[i], batch.pos[i], ids, bool(batch.logits[i]))


def test_too_many_rows_branches_or_sequences_are_an_error_with_both_counts() -> None:
    with pytest.raises(TreeError, match="5 rows do not fit a batch of 4"):
        BatchMemory(n_batch=4, n_seq_max=5).fill(tree_rows(branching_tree(), 0, 5))
    with pytest.raises(TreeError, match="3 branches and needs 4 sequences, 3 are in use"):
        tree_rows(branching_tree(), 0, 3)
    with pytest.raises(TreeError, match="needs 65 sequences, the context has 64"):
        SequenceCache(FakeTarget(n_seq_max=64)).reserve(65)


def test_nodes_merge_and_chains_reuse_them() -> None:
    tree = TokenTree(1)
    node = tree.add(0, 2, output=False)
    assert not tree.outputs[node]
    assert tree.add(0, 2) == node
    assert tree.outputs[node]
    assert tree.add(0, 2, merge=False) == 2
    assert tree.children(0, 2) == [1, 2]
    tree = TokenTree(1)
    for max_new in (2, 0):
        assert tree.add_chain(0, [2, 3, 4, 5], max_new=max_new) == 2
        assert tree.tokens == [1, 2, 3]
    tree.add_chain(0, [2, 4], max_new=1)
    assert tree.tokens == [1, 2, 3, 4]
    assert tree.parents == [-1, 0, 1, 1]
    tree = branching_tree()
    tree.add_nodes([0, 5], [15, 16], [True, True], draft=False)
    assert tree.children(0, 15) == []
    assert tree.n_drafted == 4
    with pytest.raises(ValueError, match="drafts cannot be added after non-draft nodes"):
        tree.add_chain(0, [17])


def test_tokens_are_followed_through_the_drafts_that_match() -> None:
    tree = TokenTree(1)
    tree.add_chain(0, [2, 3, 4])  # nodes 1, 2, 3
    assert tree.path_to(3) == [0, 1, 2, 3]
    tree.add_chain(0, [2, 5, 6])  # nodes 4, 5
    tree.add(0, 7, draft=False)
    assert tree.follow(0, [2, 3, 4, 9]) == [1, 2, 3]
    assert tree.follow(0, [2, 5, 6]) == [1, 4, 5]
    assert tree.follow(1, [5]) == [4]
    assert tree.follow(0, [7]) == []
    assert tree.follow(0, []) == []


def test_a_pruned_tree_equals_one_built_from_the_kept_nodes() -> None:
    rng, q = random.Random(2), np.ones(1, np.float32)
    for _ in range(200):
        tree = TokenTree(0)
        for token in range(1, rng.randrange(2, 12)):
            parent = rng.choice((0, len(tree) - 1, rng.randrange(len(tree))))
            tree.add(parent, token, prob=0.5, draft_probs=q if rng.random() < 0.3 else None)
        kept = [0]
        for node in range(1, len(tree)):
            if tree.parents[node] in kept and rng.random() < 0.8:
                kept.append(node)
        expected = TokenTree(0)
        for node in kept[1:]:
            parent = kept.index(tree.parents[node])
            sampled = tree.draft_probs.get(node)
            expected.add(parent, tree.tokens[node], prob=0.5, draft_probs=sampled)
        tree.keep(kept[1:])
        names = ("tokens", "parents", "depths", "outputs", "probs", "draft_probs", "n_drafted")
        for name in names:
            assert getattr(tree, name) == getattr(expected, name)
        assert tree.drafts() == expected.drafts()


def prefilled(tokens: list[int], n_seq: int) -> tuple[FakeTarget, SequenceCache]:
    target = FakeTarget()
    cache = SequenceCache(target)
    cache.reserve(n_seq)
    prefill(cache, tokens)
    return target, cache


@pytest.mark.parametrize(
    ("tree", "path", "tokens", "copies"),
    [
        (branching_tree(), [0, 1, 3], [1, 2, 10, 11, 13], True),
        (branching_tree(), [0], [1, 2, 10], False),
        (chain_of(3, 4, 5, 6), [0, 1, 2], [1, 2, 3, 4, 5], False),
    ],
)
def test_commit_keeps_the_accepted_path_in_every_sequence_and_copies_only_a_branch(
    tree: TokenTree, path: list[int], tokens: list[int], copies: bool
) -> None:
    target, cache = prefilled([1, 2], n_seq=4)
    rows = tree_rows(tree, cache.n_past, cache.n_seq)
    target.decode(rows)
    cache.commit(rows, path)
    assert (cache.tokens, target.copies > 0) == (tokens, copies)
    assert [target.tokens_of(s) for s in range(4)] == [tokens] * 4


def test_a_prompt_is_read_in_chunks_after_the_common_prefix() -> None:
    target, cache = prefilled([1, 2, 3, 4], n_seq=2)
    assert prefill(cache, [1, 2, 9, 9, 9]) == 2
    assert [row.token for row in listed(target.decoded[-1])] == [9, 9, 9]
    assert target.tokens_of(1) == [1, 2, 9, 9, 9]
    target = FakeTarget(n_batch=4)
    prefill(SequenceCache(target), list(range(10)))
    assert [len(rows) for rows in target.decoded] == [4, 4, 2]
    assert not any(row.output for rows in target.decoded for row in listed(rows))


@pytest.mark.parametrize("reserved", ["before", "after"])
def test_the_deferred_end_of_a_prompt_is_decoded_with_the_first_tree(reserved: str) -> None:
    target, tree = FakeTarget(n_batch=16), branching_tree()
    (slot,) = Slots(target, 1).slots
    cache = SequenceCache(slot)
    if reserved == "before":
        cache.reserve(n_sequences(tree))
    n_read = 0
    if reserved == "after":  # some of the prompt is read by then
        prefill(cache, [1])
        n_read = 1
    assert prefill(cache, [1, 2], defer=True) == n_read
    assert (len(target.decoded), cache.n_past, cache.n_deferred) == (n_read, 2, 2 - n_read)
    cache.reserve(n_sequences(tree))
    rows = tree_rows(tree, cache.n_past, cache.n_seq)
    output = slot.decode(cache.with_deferred(rows))
    assert listed(target.decoded[-1]) == [
        *[Row(token, token - 1, (0, 1, 2, 3), False) for token in (1, 2)[n_read:]],
        *listed(rows),
    ]
    np.testing.assert_array_equal(output.logits(0), fake_logits((1, 2, 10)))
    np.testing.assert_array_equal(output.logits(3), fake_logits((1, 2, 10, 11, 13)))
    cache.commit(rows, [0, 1, 3])
    assert (cache.tokens, cache.n_deferred) == ([1, 2, 10, 11, 13], 0)
    assert [target.tokens_of(s) for s in range(5)] == [[1, 2, 10, 11, 13]] * 4 + [[]]


def test_deferred_tokens_leave_room_for_a_row_and_do_not_count_as_cached() -> None:
    for n_tokens, n_decoded in ((3, 0), (4, 4), (7, 4), (8, 8), (11, 8)):
        target = FakeTarget(n_batch=4)
        cache = SequenceCache(target)
        prefill(cache, list(range(n_tokens)), defer=True)
        assert sum(map(len, target.decoded)) == n_decoded
        assert (cache.n_past, cache.n_deferred) == (n_tokens, n_tokens - n_decoded)
    for way in ("truncate", "prefill"):
        target = FakeTarget(n_batch=4)
        cache = SequenceCache(target)
        prefill(cache, [0, 1, 2, 3, 4, 5], defer=True)
        if way == "truncate":
            cache.truncate(5)
        else:
            prefill(cache, [0, 1, 2, 3])
        assert (cache.tokens, cache.n_deferred) == ([0, 1, 2, 3], 0)
        assert target.tokens_of(0) == [0, 1, 2, 3]


def test_a_cancelled_prefill_keeps_its_chunks_and_a_full_context_is_refused() -> None:
    target = FakeTarget(n_batch=4)
    target.n_until_cancelled = 2
    cache = SequenceCache(target)
    with pytest.raises(Cancelled):
        prefill(cache, list(range(10)))
    assert cache.tokens == list(range(8))
    assert target.n_cells() == 8
    target.n_until_cancelled = 9
    assert prefill(cache, list(range(10))) == 8
    cache = SequenceCache(FakeTarget(n_ctx=8))
    with pytest.raises(PromptTooLong, match=r"9 tokens but the context holds 8.*at least 10"):
        prefill(cache, list(range(8)))


def test_reserved_sequences_get_the_tokens_and_truncating_drops_them() -> None:
    target, cache = prefilled([1, 2, 3], n_seq=1)
    cache.reserve(3)
    assert [target.tokens_of(s) for s in range(4)] == [[1, 2, 3], [1, 2, 3], [1, 2, 3], []]
    cache.reserve(1)
    assert [target.tokens_of(s) for s in range(4)] == [[1, 2, 3], [], [], []]
    target, cache = prefilled([1, 2, 3], n_seq=2)
    target.decode(tree_rows(TokenTree(9), 3, 2))
    cache.truncate(2)
    assert cache.tokens == [1, 2]
    assert [target.tokens_of(s) for s in range(2)] == [[1, 2]] * 2


def test_a_chain_needs_only_one_sequence() -> None:
    tree = TokenTree(3)
    assert n_sequences(tree) == 1
    tree.add_chain(0, [4, 5, 6])
    assert n_sequences(tree) == 1
    tree.add(1, 7)
    assert n_sequences(tree) == 3
    tree.n_seq = 8
    assert n_sequences(tree) == 8
    chain = TokenTree(3)
    chain.branches.append(chain.add(0, 4))
    assert n_sequences(chain) == 2


def test_a_model_size_is_named_by_its_parameter_count() -> None:
    sizes = (980, 260_032, 950_912, 13_902_080, 494_032_768, 6_738_415_616, 46_702_792_704)
    named = [size_name(n) for n in sizes]
    assert named == ["980", "260K", "951K", "14M", "494M", "6.7B", "47B"]


def test_the_last_texts_with_equal_rows_can_be_taken_back() -> None:
    def back(*n_rows: int) -> dict[int, int]:
        ids = [range(s, s + 1) for s, n in enumerate(n_rows) for _ in range(n)]
        return rows_back(Rows([0] * len(ids), range(len(ids)), ids, [True] * len(ids)), 8)

    assert back(4) == {0: 3}
    assert back(20) == {0: 8}
    assert back(1, 4, 4) == {2: 3, 1: 3}
    assert back(4, 3, 4) == {2: 3}  # the state of the first may have been moved
    assert back(4, 4, 1) == {2: 0}


def test_a_text_keeps_what_a_recurrent_state_allows_and_restores_saved_ones() -> None:
    cache = SequenceCache(FakeTarget(n_rewind=2))
    prefill(cache, list(range(1, 12)))  # saved after 3 tokens
    assert cache.n_kept([*range(1, 12), 5]) == 11
    assert cache.n_kept([*range(1, 11), 5]) == 3
    assert cache.n_kept([1, 2, 5]) == 0
    assert n_kept([1, 2, 3], [1, 2, 5], saved=None) == 2
    target = FakeTarget(n_rewind=2)
    cache = SequenceCache(target)
    prefill(cache, list(range(1, 12)))  # saved after 3 tokens
    assert prefill(cache, [*range(1, 7), 9, 9, 9]) == 3
    assert prefill(cache, [1, 2, 9, 9]) == 0  # nothing was saved before these
    assert target.tokens_of(0) == cache.tokens == [1, 2, 9, 9]
    long = [token % 12 for token in range(100)]
    for end in (40, 60, 80, 100):
        assert prefill(cache, long[:end]) == (0 if end == 40 else end - 20)
    assert prefill(cache, [*long[:75], 9]) == 72
    assert prefill(cache, [*long[:60], 9]) == 52
    assert prefill(cache, [*long[:45], 9]) == 32


def test_states_are_saved_where_they_save_most_reading() -> None:
    target = FakeTarget(n_ctx=2048, n_rewind=2)
    cache, prompt = SequenceCache(target), [n % 10 for n in range(1200)]
    prompt[99] = prompt[699] = prompt[1195] = 11
    reading = Reading(cache, prompt, turn_ends=(11,))
    shared = [reading.n_shared(n) for n in (99, 100, 699, 1200)]
    assert shared == [0, 100, 512, 1192]
    while (rows := reading.next_rows()) is not None:
        reading.take(target.decode(rows))
    assert [n for n, _ in cache.saved] == [100, 512, 700, 1024, 1192]
    assert Reading(cache, [*prompt[:800], 9]).n_reused == 700
    steps, turns = range(512, 4000, 512), [4002, 4050, 4100, 4150, 4200]
    assert worth_saving([*steps, *turns]) == [1024, 2048, 3072, *turns]
    assert worth_saving([*turns, *range(4300, 4800, 100)]) == [4002, *range(4100, 4701, 100)]


def test_trees_of_two_texts_and_prompts_are_decoded_together() -> None:
    target = FakeTarget(n_seq_max=8)
    shared = Slots(target, 2)
    caches = [SequenceCache(slot) for slot in shared.slots]
    for cache, text in zip(caches, ([1, 2], [3, 4, 5]), strict=True):
        prefill(cache, text)
        cache.reserve(4)
    trees = [branching_tree(6), branching_tree(7)]
    parts = [tree_rows(tree, c.n_past, c.n_seq) for tree, c in zip(trees, caches, strict=True)]
    outputs = shared.decode(list(zip(shared.slots, parts, strict=True)))
    assert listed(target.decoded[-1]) == [
        Row(6, 2, (0, 1, 2, 3), True),
        Row(11, 3, (1, 2), True),
        Row(12, 4, (1,), True),
        Row(13, 4, (2,), True),
        Row(14, 3, (3,), True),
        Row(7, 3, (4, 5, 6, 7), True),
        Row(11, 4, (5, 6), True),
        Row(12, 5, (5,), True),
        Row(13, 5, (6,), True),
        Row(14, 4, (7,), True),
    ]
    np.testing.assert_array_equal(outputs[0].logits(3), fake_logits((1, 2, 6, 11, 13)))
    np.testing.assert_array_equal(outputs[1].logits(4), fake_logits((3, 4, 5, 7, 14)))
    caches[0].commit(parts[0], [0, 1, 3])
    caches[1].commit(parts[1], [0, 4])
    sequences = [target.tokens_of(seq_id) for seq_id in range(8)]
    assert sequences == [[1, 2, 6, 11, 13]] * 4 + [[3, 4, 5, 7, 14]] * 4
    caches[0].truncate(0)
    assert target.tokens_of(0) == []
    assert target.tokens_of(4) == [3, 4, 5, 7, 14]
    target = FakeTarget(n_seq_max=4)
    shared = Slots(target, 2)
    writing, other = (SequenceCache(slot) for slot in shared.slots)
    prefill(writing, [1, 2])
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


def test_a_slot_takes_over_a_beginning_or_a_state_of_another_text() -> None:
    target = FakeTarget(n_seq_max=4)
    shared = Slots(target, 2)
    first, second = (SequenceCache(slot) for slot in shared.slots)
    prefill(first, [1, 2, 3, 4])
    second.share(first, 3)
    assert prefill(second, [1, 2, 3, 9]) == 3
    assert [row.token for row in listed(target.decoded[-1])] == [9]
    assert (target.tokens_of(0), target.tokens_of(2)) == ([1, 2, 3, 4], [1, 2, 3, 9])
    assert target.n_cells() == 5
    target = FakeTarget(n_rewind=2, n_seq_max=3)
    first, second, third = (SequenceCache(slot) for slot in Slots(target, 3).slots)
    prefill(first, list(range(1, 12)))  # saved after 3 tokens
    second.share(first, first.n_kept([1, 2, 3, 4, 9]))
    assert prefill(second, [1, 2, 3, 4, 9]) == 3
    third.share(first, first.n_kept([*range(1, 12), 9]))
    assert prefill(third, [*range(1, 12), 9]) == 11
    sequences = [target.tokens_of(seq_id) for seq_id in range(3)]
    assert sequences == [[*range(1, 12)], [1, 2, 3, 4, 9], [*range(1, 12), 9]]


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
