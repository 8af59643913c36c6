"""EAGLE's head: the layer, the trees, its input states, files and real decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from batching.cache import SequenceCache
from batching.draft_context import DraftContext
from batching.errors import InvalidParameter
from batching.gguf.reader import GGUFFile
from batching.rows import tree_rows
from batching.target import Cancelled
from batching.together import run
from batching.tree import NO_LIMIT, Floats, TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.head_context import HeadContext
from speculation.drafting.head_drafter import GrownParams, HeadDrafter
from speculation.drafting.tree_growth import Growth, top_tokens
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.methods.eagle import (
    Eagle1Params,
    FixedTreeDrafter,
    parse_choices,
)
from tests.support.exact import EXACT, PROMPT
from tests.support.fake_target import (
    FakeEagleHead,
    FakeTarget,
    fake_hidden,
    fake_logits,
    listed,
    prefill,
)
from tests.support.head_checks import TEXT, check_a_tree, check_texts, started
from tests.support.reference import layer, rms_norm
from tests.support.tiny_gguf import N_TINY
from tests.support.tiny_heads import eagle_tensors, write_eagle_head

# The layer


def reference(w: dict[str, Floats], x: Floats) -> Floats:
    """The head's states for one sequence of inputs x, (time, 32), in plain NumPy."""
    y = layer(w, rms_norm(x, w["blk.0.attn_norm.weight"]), x)
    return rms_norm(y, w["output_norm.weight"])


def test_the_layer_in_llama_cpp_matches_the_reference_on_every_path_of_a_tree(
    tmp_path: Path, tiny_model: Path
) -> None:
    w, target = eagle_tensors(), GGUFFile(tiny_model)
    embeddings, output_matrix = target.tensor("token_embd.weight"), target.output_matrix()
    states = np.random.default_rng(1).standard_normal((len(TEXT), 32)).astype(np.float32)

    def after(tokens: Sequence[int], states: Floats) -> Floats:
        known = embeddings[list(tokens)]
        x = np.concatenate([known, states], axis=1) @ w["fc.weight"].T + w["fc.bias"]
        return reference(w, x)[-1]

    path = write_eagle_head(tmp_path / "head.gguf", tiny_model)
    with started(path, tiny_model, "eagle") as head:
        root, logits = check_a_tree(head, states, after, atol=1e-5)
    np.testing.assert_allclose(logits, output_matrix @ root, atol=1e-4)


# Trees


def dynamic(prefix: tuple[int, ...], depth: int, width: int) -> Growth:
    """EAGLE-2's candidates when the draft is the fake target itself."""
    levels = DraftContext(FakeTarget())
    levels.begin(prefix, width)
    growth = Growth(prefix[-1], Acceptance())
    output = run(levels.root(prefix))
    run(
        growth.levels(
            lambda node, logits: growth.add_likely(node, top_tokens(logits, width)),
            levels.level,
            output,
            levels.root_row,
            depth=depth,
            width=width,
        )
    )
    return growth


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_the_dynamic_tree_is_as_good_as_exhaustive_search() -> None:
    for seed in range(8):
        prefix = (seed, seed + 1, 3)
        # All candidates: three drafts below each node, two levels deep.
        values: dict[tuple[int, ...], float] = {}
        for token, p in top_tokens(fake_logits(prefix), 3):
            values[(token,)] = p
            for below, q in top_tokens(fake_logits((*prefix, token)), 3):
                values[(token, below)] = p * q
        for most in (1, 4, 6):
            best = max(
                sum(values[path] for path in some)
                for some in combinations(values, most)
                if all(path[:-1] in ((), *some) for path in some)
            )
            growth = dynamic(prefix, 2, 3)
            chosen = growth.likeliest(most)
            assert len(chosen) == most
            assert all(growth.tree.parents[node] in (0, *chosen) for node in chosen)
            assert sum(growth.path_probs[node] for node in chosen) == pytest.approx(best)


def test_only_the_likeliest_paths_of_a_level_are_expanded() -> None:
    growth = dynamic((1, 2, 3), 3, 2)
    tree, reached = growth.tree, growth.path_probs
    assert len(tree) == 1 + 2 + 2 * 2 + 2 * 2
    second = sorted(sorted(range(3, 7), key=lambda node: -reached[node])[:2])
    assert sorted({*tree.parents[7:]}) == second
    for node in (1, 2):
        below = softmax(fake_logits((1, 2, 3, tree.tokens[node])))
        expected = np.argsort(-below)[:2].tolist()
        assert [tree.tokens[n] for n in range(3, 7) if tree.parents[n] == node] == expected


def test_a_static_tree_has_the_given_ranks_and_becomes_these_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = DraftContext(FakeTarget())
    text = (1, 2, 3)
    levels.begin(text, 2)
    output = run(levels.root(text))
    context = HeadContext(FakeEagleHead(fake_logits))
    monkeypatch.setattr(context, "level", levels.level)
    drafter = FixedTreeDrafter(Eagle1Params(choices="0.0.1/1.0"), context)
    growth = Growth(3, Acceptance())
    chosen = run(drafter._grow_below(output, levels.root_row, growth, DraftBudget()))
    assert chosen == range(1, 6)
    ranked = np.argsort(-fake_logits(text))
    a, b = int(ranked[0]), int(ranked[1])
    aa, ba = (int(np.argmax(fake_logits((*text, t)))) for t in (a, b))
    aab = int(np.argsort(-fake_logits((*text, a, aa)))[1])
    tree = growth.tree
    assert tree.tokens[1:] == [a, b, aa, ba, aab]
    assert tree.parents[1:] == [0, 0, 1, 2, 3]
    rows = listed(tree_rows(tree, 2, 3))
    assert [row.position for row in rows] == [2, 3, 3, 4, 4, 5]
    assert [row.seq_ids for row in rows] == [(0, 1, 2), (1,), (2,), (1,), (2,), (1,)]


# The states


class Recorder(FakeEagleHead):
    """Records the token and the state of each row."""

    def __init__(self) -> None:
        super().__init__(fake_logits)
        self.rows: list[tuple[int, list[float]]] = []

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        self.rows += list(zip(tokens, np.array(states).tolist(), strict=True))
        return super().inputs(tokens, states)


def state(*prefix: int) -> list[float]:
    return fake_hidden(prefix).tolist()


def test_every_row_gets_its_token_and_the_state_before_it() -> None:
    target, head = FakeTarget(), Recorder()
    levels = HeadContext(head)
    eagle = HeadDrafter(GrownParams(depth=2, top_k=1, nodes=2, window=3), levels)
    cache = SequenceCache(target)
    prompt = [1, 2, 3, 4, 5, 6]
    prefill(cache, prompt[:-1], reader=eagle.requires.prompt_reader)
    eagle.begin(prompt)
    tree = TokenTree(6)
    run(eagle.draft(prompt, tree, DraftBudget()))
    one = int(fake_logits((1, 2, 3, 4, 5, 6)).argmax())
    # Three states of the prompt were read, those of 3, 4 and 5; the head itself then saw 4, 5, 6.
    assert head.rows == [
        (4, state(1, 2, 3)),
        (5, state(1, 2, 3, 4)),
        (6, state(1, 2, 3, 4, 5)),
        (one, fake_hidden((4, 5, 6)).tolist()),  # the state given by the head's own context
    ]
    head.rows.clear()
    target.want_hidden(True)
    rows = tree_rows(tree, cache.n_past, 1)
    output = target.decode(rows)
    cache.commit(rows, [0, 1])
    eagle.observe(Step(tree, output, [0, 1], 9))
    target.want_hidden(False)
    run(eagle.draft([*prompt, one, 9], TokenTree(9), DraftBudget()))
    assert head.rows[:2] == [(one, state(*prompt)), (9, state(*prompt, one))]


def test_another_prompt_reuses_the_rows_of_the_common_prefix() -> None:
    target, head = FakeTarget(), Recorder()
    levels = HeadContext(head)
    eagle = FixedTreeDrafter(Eagle1Params(choices="0"), levels)
    cache = SequenceCache(target)
    for prompt, reused, expected in (
        ([1, 2, 3, 4], 0, [(2, state(1)), (3, state(1, 2)), (4, state(1, 2, 3))]),
        # Tokens up to 3 are cached, but the state after 3 is gone: it is decoded again.
        ([1, 2, 3, 7, 8], 2, [(7, state(1, 2, 3)), (8, state(1, 2, 3, 7))]),
        ([5, 6], 0, [(6, state(5))]),
    ):
        head.rows.clear()
        assert prefill(cache, prompt[:-1], reader=eagle.requires.prompt_reader) == reused
        eagle.begin(prompt)
        run(eagle.draft(prompt, TokenTree(prompt[-1]), DraftBudget()))
        assert head.rows == expected
        assert isinstance(head.context, FakeTarget)
        assert len(head.context.tokens_of(0)) == len(prompt) - 1


def test_unobserved_steps_leave_a_gap_and_a_step_without_a_draft() -> None:
    target, head = FakeTarget(), Recorder()
    target.want_hidden(True)
    eagle = FixedTreeDrafter(Eagle1Params(choices="0"), HeadContext(head))
    eagle.begin([1, 2])
    tree = TokenTree(2)
    run(eagle.draft([1, 2], tree, DraftBudget()))
    assert len(tree) == 1  # no states of the prompt were read
    cache = SequenceCache(target)
    prefill(cache, [1])
    output = run(cache.extend([2]))
    eagle.observe(Step(TokenTree(2), output, [0], 3))
    tree = TokenTree(7)
    run(eagle.draft([1, 2, 3, 5, 7], tree, DraftBudget()))
    assert len(tree) == 1
    run(cache.extend([3, 5]))
    eagle.observe(Step(TokenTree(7), run(cache.extend([7])), [0], 8))
    run(eagle.draft([1, 2, 3, 5, 7, 8], TokenTree(8), DraftBudget()))
    assert head.rows == [(8, state(1, 2, 3, 5, 7))]


def test_a_cancelled_prompt_is_read_from_where_it_stopped() -> None:
    head = Recorder()
    levels = HeadContext(head)
    eagle = FixedTreeDrafter(Eagle1Params(choices="0"), levels)
    reader = eagle.requires.prompt_reader
    cache, prompt = SequenceCache(target := FakeTarget(n_batch=2)), [1, 2, 3, 4, 5, 6]
    target.n_until_cancelled = 1
    with pytest.raises(Cancelled):
        prefill(cache, prompt[:-1], reader=reader)
    target.n_until_cancelled = 9
    assert prefill(cache, prompt[:-1], reader=reader) == 2  # the states of these were read
    eagle.begin(prompt)
    run(eagle.draft(prompt, TokenTree(6), DraftBudget()))
    assert [token for token, _ in head.rows] == [2, 3, 4, 5, 6]


def test_only_a_bounded_part_of_the_prompt_is_decoded_again_for_states() -> None:
    cached = list(range(100))
    for n_rewind, n_reused in ((NO_LIMIT, 36), (8, 100)):
        levels = HeadContext(Recorder())
        levels.window, levels.depth = 1024, 5
        cache = SequenceCache(FakeTarget(n_rewind=n_rewind))
        prefill(cache, cached)
        assert prefill(cache, [*cached, 7, 8], reader=levels) == n_reused


def test_a_full_head_context_ends_drafting_without_an_error() -> None:
    head = FakeEagleHead(fake_logits)
    head._context = FakeTarget(n_ctx=12)
    head.context.want_hidden(True)
    levels = HeadContext(head)
    eagle = HeadDrafter(GrownParams(depth=2, top_k=2, nodes=4), levels)
    for n, drafted in ((6, True), (12, False)):
        prompt = list(range(n))
        prefill(SequenceCache(FakeTarget()), prompt[:-1], reader=eagle.requires.prompt_reader)
        eagle.begin(prompt)
        tree = TokenTree(prompt[-1])
        run(eagle.draft(prompt, tree, DraftBudget()))
        assert (len(tree) > 1) == drafted


# Parameters


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="top_k is 17; give 1 to 16"):
        GrownParams(top_k=17)
    with pytest.raises(InvalidParameter, match="window is -1"):
        Eagle1Params(window=-1)
    with pytest.raises(InvalidParameter, match="choices go 17 deep; the limit is 16"):
        Eagle1Params(choices=".".join("0" * 17))
    with pytest.raises(InvalidParameter, match="choices expand 20 nodes .*; the limit is 16"):
        Eagle1Params(choices="/".join(f"{a}.0" for a in range(20)))
    assert len(Eagle1Params().shape) == 25


def test_paths_of_ranks_include_the_nodes_on_their_way() -> None:
    nodes = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
    assert parse_choices("0.0.0.0/0.1.0/1.0/1.1") == nodes
    assert Eagle1Params(choices="0.0.0.0/0.1.0/1.0/1.1").n_branches == 4


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("0.0/x", "choices has 'x'; give paths of ranks like 0.0.0.0/0.1.0"),
        ("0//1", "choices has ''"),
        ("0.64", "choices has '0.64'; .* from 0, the likeliest, to 63"),
        ("0.-1", "choices has '0.-1'"),
        ("/".join(f"{a}.{b}" for a in range(20) for b in range(20)), "420 nodes; the limit is 255"),
    ],
)
def test_choices_that_do_not_form_a_tree_are_refused(choices: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        parse_method(f"eagle-1:choices={choices}")


# Real decoding

METHODS = (
    "eagle-1",
    "eagle-1:choices=0.0.0/1.1/2/3,window=4",
    "eagle-2",
    "eagle-2:depth=3,top_k=2,nodes=5,window=0",
    "auto:sources=eagle",
)


@pytest.mark.parametrize(("kind", "some"), [("f32", False), ("q8_0", True)])
def test_any_head_gives_the_text_of_plain_decoding(
    tmp_path: Path, tiny_model: Path, kind: str, some: bool
) -> None:
    tokens = sorted(random.Random(0).sample(range(N_TINY), 100)) if some else None
    path = write_eagle_head(tmp_path / "head.gguf", tiny_model, tokens=tokens, kind=kind)
    with Engine.load(tiny_model, EXACT, heads=path) as engine:
        stats = check_texts(engine, METHODS, max_tokens=50)
        layer = engine.resources.heads["eagle"].context.model.path
        assert layer.exists()
    assert not layer.parent.exists()  # a temporary file
    assert stats["eagle-1"].n_drafted == 25 * stats["eagle-1"].n_steps


def test_reading_states_of_a_prompt_changes_no_text(tmp_path: Path, tiny_model: Path) -> None:
    """A reply, then a second turn, then the first prompt again."""
    path = write_eagle_head(tmp_path / "head.gguf", tiny_model)
    with Engine.load(tiny_model, EXACT, heads=path) as engine:
        first = engine.generate(PROMPT, method="eagle-2", max_tokens=20).run()
        turn = engine.model.tokenize("a dog saw", add_special=False)
        text = [*first.prompt, *first.token_ids, *turn]
        second = engine.generate(text, method="eagle-2", max_tokens=20).run()
        assert second.stats.n_reused >= len(first.prompt) + len(first.token_ids) - 2
        # In the last two steps one token is left below the root, and none.
        assert second.stats.n_drafted == 24 * 18 + 8
        plain = engine.generate(text, method="ar", max_tokens=20).run()
        assert second.token_ids == plain.token_ids
        again = engine.generate(PROMPT, method="eagle-1", max_tokens=20).run()
        assert again.token_ids == first.token_ids
