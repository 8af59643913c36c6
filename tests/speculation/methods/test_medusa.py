"""Medusa heads: forward pass and trees."""

from __future__ import annotations

import numpy as np
import pytest

from speculation.heads.file import HeadsWeights
from speculation.heads.medusa import MedusaHeads
from speculation.methods.medusa import Medusa, MedusaParams
from tests.support.fake_methods import FakeHeads
from tests.support.fake_target import fake_hidden, fake_logits
from tests.support.head_checks import second_tree
from tests.support.tiny_heads import medusa_weights

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


def test_the_likeliest_paths_are_drafted_one_head_a_level() -> None:
    bonus = int(fake_logits((1, 2, 3)).argmax())
    tree = second_tree(Medusa(MedusaParams(nodes=3), FakeHeads()), bonus)
    (heads,) = FakeHeads().top([fake_hidden((1, 2, 3))])
    best = [choices[0][0] for choices in heads]
    # First choices count for 0.52, second ones for 0.35, so two first ones in a row for 0.27.
    assert tree.tokens[1:] == [best[0], heads[0][1][0], best[1]]
    assert tree.parents[1:] == [0, 0, 1]
