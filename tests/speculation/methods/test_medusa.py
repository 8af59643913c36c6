"""Medusa heads: forward pass, trees, files and real decoding."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.together import run
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import Acceptance
from speculation.engine import Engine
from speculation.heads.file import HeadsWeights
from speculation.heads.medusa import MedusaHeads
from speculation.methods import parse_method
from speculation.methods.medusa import Medusa, MedusaParams
from tests.support.exact import EXACT
from tests.support.fake_target import FakeHeads, FakeOutput, fake_hidden, fake_logits
from tests.support.head_checks import check_that_a_gap_is_noticed, compared_texts, second_tree
from tests.support.tiny_gguf import N_TINY
from tests.support.tiny_heads import medusa_weights, write_medusa_heads

# The forward pass


def test_a_head_adds_a_gated_residual_and_reads_the_output_matrix() -> None:
    weights = HeadsWeights(
        {
            "head.0.block.0.weight": np.array([[1, 0], [0, 2]], np.float32),
            "head.0.block.0.bias": np.array([0, -1], np.float32),
        },
        output=np.array([[1, 0], [0, -1], [1, 1]], np.float32),
        tokens=np.array([7, 8, 9], np.int32),
    )
    heads = MedusaHeads(weights)
    hidden = np.ones(2, np.float32)
    # W h + b = (1, 1), SiLU(1) = 0.73106, so the state becomes (1.73106, 1.73106).
    np.testing.assert_allclose(
        heads.logits(hidden[None])[:, 0], [[1.73106, -1.73106, 3.46212]], atol=1e-5
    )
    ((choices,),) = heads.top([hidden])
    tokens, probs = zip(*choices, strict=True)
    assert tokens == (9, 7, 8)
    np.testing.assert_allclose(probs[:2], [0.84555, 0.14975], atol=1e-5)


@pytest.mark.parametrize("tokens", [None, [3, 300, 17, 5, 270]])
def test_blocks_follow_each_other_and_every_state_has_its_own_choices(
    tokens: list[int] | None,
) -> None:
    w = medusa_weights(n_blocks=2, tokens=tokens, scale=3.0)
    hidden = np.random.default_rng(1).standard_normal((2, 32)).astype(np.float32)
    heads = MedusaHeads(w)
    first, second = heads.top(list(hidden))
    np.testing.assert_allclose(heads.top([hidden[1]])[0], second, rtol=1e-4)
    for head, choices in enumerate(first):
        state = hidden[0]
        for block in (f"head.{head}.block.0", f"head.{head}.block.1"):
            inner = w.tensors[f"{block}.weight"] @ state + w.tensors[f"{block}.bias"]
            state = state + inner / (1 + np.exp(-inner))
        logits = w.output @ state
        best = np.argsort(-logits)[:8]
        expected = best if tokens is None else np.array(tokens)[best]
        assert [token for token, _ in choices] == expected.tolist()
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        np.testing.assert_allclose([prob for _, prob in choices], probs[best], rtol=1e-3)


# The drafter


def drafted(params: MedusaParams, floor: float = 0.0) -> TokenTree:
    """The tree of the second step of a text, on the fake target's states."""
    bonus = int(fake_logits((1, 2, 3)).argmax())
    return second_tree(Medusa(params, FakeHeads()), bonus, floor)


def test_the_likeliest_paths_are_drafted_one_head_a_level() -> None:
    tree = drafted(MedusaParams(nodes=3))
    (heads,) = FakeHeads().top([fake_hidden((1, 2, 3))])
    best = [choices[0][0] for choices in heads]
    # First choices count for 0.52, second ones for 0.35, so two first ones in a row for 0.27.
    assert tree.tokens[1:] == [best[0], heads[0][1][0], best[1]]
    assert tree.parents[1:] == [0, 0, 1]


def test_a_least_path_probability_selects_the_likeliest_paths() -> None:
    low, high = drafted(MedusaParams(), floor=0.05), drafted(MedusaParams(), floor=0.3)
    assert len(low) > len(high) > 1
    for tree, floor in ((low, 0.05), (high, 0.3)):
        reached = [1.0]
        for parent, prob in zip(tree.parents[1:], tree.probs[1:], strict=True):
            reached.append(reached[parent] * prob)
        assert min(reached) >= floor


def test_acceptance_is_learnt_from_the_token_that_followed() -> None:
    acceptance = Acceptance([0.0] * 80)
    heads = FakeHeads()
    medusa = Medusa(MedusaParams(), heads, acceptance)
    text = [1, 2, 3]
    medusa.begin(text)
    run(medusa.draft(text, TokenTree(3), DraftBudget()))
    state = FakeOutput([(1, 2, 3)], [True], fake_logits, True)
    medusa.observe(Step(TokenTree(3), state, [0], 4))
    run(medusa.draft([*text, 4], TokenTree(4), DraftBudget()))
    best, _ = heads.top([fake_hidden((1, 2, 3))])[0][0][0]
    medusa.observe(Step(TokenTree(4), state, [0], best))
    assert acceptance.prob(5) > acceptance.prob(3)  # its first choice had 0.5, its second 0.3


def test_a_state_from_another_position_is_not_used() -> None:
    check_that_a_gap_is_noticed(Medusa(MedusaParams(), FakeHeads()))


def test_a_tree_without_nodes_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="nodes is 0; give 1 to 255"):
        parse_method("medusa:nodes=0")


# Real decoding

METHODS = ("medusa", "medusa:nodes=6", "auto:sources=medusa")


@pytest.mark.parametrize("n_blocks", [1, 2])
def test_heads_of_any_kind_give_the_text_of_plain_decoding(
    tmp_path: Path, tiny_model: Path, n_blocks: int
) -> None:
    words = None if n_blocks == 1 else random.Random(0).sample(range(N_TINY), 100)
    weights = medusa_weights(n_blocks=n_blocks, tokens=words)
    path = write_medusa_heads(tmp_path / "heads.gguf", tiny_model, weights)
    with Engine.load(tiny_model, EXACT, heads=path) as engine:
        for method, plain, ours in compared_texts(engine, METHODS, max_tokens=50):
            is_held = plain.request.sampling.has_structure  # then drafts are dropped
            if method == "medusa:nodes=6" and plain.stats.n_tokens > 5 and not is_held:
                assert ours.stats.n_drafted == 6 * (ours.stats.n_steps - 1)
