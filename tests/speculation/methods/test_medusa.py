"""Medusa heads: forward pass, trees, files and real decoding."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.target import Output
from batching.together import run
from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import Acceptance
from speculation.engine import Engine
from speculation.heads.arrays import Arrays, TorchArrays
from speculation.heads.medusa import MedusaHeads, MedusaWeights
from speculation.heads.tree import (
    Choices,
    best_tree,
    expected_tokens,
    n_leaves,
    parse_choices,
    show_choices,
)
from speculation.methods import parse_method
from speculation.methods.medusa import Medusa, MedusaParams
from speculation.sampling import SamplingParams
from speculation.verify import Typical
from tests.support.exact import EXACT, PROMPT, same_texts
from tests.support.fake_target import FakeHeads, FakeOutput, fake_hidden, fake_logits
from tests.support.head_checks import check_that_a_gap_is_noticed, compared_texts, second_tree
from tests.support.tiny_gguf import N_TINY
from tests.support.tiny_heads import medusa_weights, write_medusa_heads

# The forward pass


def test_a_head_adds_a_gated_residual_and_reads_the_output_matrix() -> None:
    weights = MedusaWeights(
        weights=np.array([[[[1, 0], [0, 2]]]], np.float32),
        biases=np.array([[[0, -1]]], np.float32),
        output=np.array([[1, 0], [0, -1], [1, 1]], np.float32),
        tokens=np.array([7, 8, 9], np.int32),
        accuracy=np.ones((1, 1), np.float32),
        tree=((0,),),
    )
    heads = MedusaHeads(weights)
    hidden = np.ones(2, np.float32)
    # W h + b = (1, 1), SiLU(1) = 0.73106, so the state becomes (1.73106, 1.73106).
    np.testing.assert_allclose(
        heads.logits(hidden[None])[:, 0], [[1.73106, -1.73106, 3.46212]], atol=1e-5
    )
    ((choices,),) = heads.top([(hidden, 2)])
    tokens, probs = zip(*choices, strict=True)
    assert tokens == (9, 7)
    np.testing.assert_allclose(probs, [0.84555, 0.14975], atol=1e-5)
    ((choices,),) = heads.top([(hidden, 5)])
    assert [token for token, _ in choices] == [9, 7, 8]


@pytest.mark.parametrize("tokens", [None, [3, 300, 17, 5, 270]])
@pytest.mark.train
def test_numpy_and_pytorch_give_the_same_candidates(tokens: list[int] | None) -> None:
    torch = pytest.importorskip("torch")
    weights = medusa_weights(n_blocks=2, tokens=tokens, scale=3.0)
    hidden = np.random.default_rng(1).standard_normal((2, 32)).astype(np.float32)

    state = torch.from_numpy(hidden[0]).expand(3, -1)
    for weight, bias in zip(weights.weights, weights.biases, strict=True):
        layers = [torch.nn.Linear(32, 32) for _ in range(3)]
        for head, layer in enumerate(layers):
            layer.weight.data = torch.from_numpy(weight[head])
            layer.bias.data = torch.from_numpy(bias[head])
        state = torch.stack(
            [s + torch.nn.functional.silu(layer(s)) for s, layer in zip(state, layers, strict=True)]
        )
    expected = (state @ torch.from_numpy(weights.output).T).detach().numpy()
    ours, there = MedusaHeads(weights), MedusaHeads(weights, TorchArrays(torch, "cpu"))
    np.testing.assert_allclose(ours.logits(hidden)[:, 0], expected, atol=2e-4)
    parts = [(hidden[0], 4), (hidden[1], 2)]
    (our_first, our_second), (first_there, second_there) = ours.top(parts), there.top(parts)
    for our_choices, choices_there in zip(
        [*our_first, *our_second], [*first_there, *second_there], strict=True
    ):
        np.testing.assert_allclose(our_choices, choices_there, rtol=1e-4)
    assert [len(choices) for choices in our_second] == [2, 2, 2]
    np.testing.assert_allclose(ours.top(parts[1:])[0], our_second, rtol=1e-4)


@pytest.mark.parametrize("n_drafted", [3, 64, 130, 1000])
def test_the_likeliest_tokens_come_first(n_drafted: int) -> None:
    rng = np.random.default_rng(n_drafted)
    for n in (1, 8, 40, 200):
        logits = rng.standard_normal(n_drafted).astype(np.float32)
        expected = np.argsort(-logits)[:n]
        (choices,) = Arrays().top(logits[None], n)
        assert [token for token, _ in choices] == expected.tolist()


# Trees


def test_paths_and_a_full_list_of_candidates_give_the_same_tree() -> None:
    nodes = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
    assert parse_choices("0.0.0.0/0.1.0/1.0/1.1") == nodes
    assert parse_choices([[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]) == nodes
    assert parse_choices(nodes) == nodes
    assert show_choices(nodes) == "0.0.0.0/0.1.0/1.0/1.1"
    assert n_leaves(nodes) == 4


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("0.0/x", "choices has 'x'; give paths of ranks like 0.0.0.0/0.1.0"),
        ("0//1", "choices has ''"),
        ("0.0/1/0.0", "the path 0.0 twice"),
        ("0.64", r"64 in 0\.64; give ranks from 0, the likeliest, to 63"),
        ([[0], []], "an empty path"),
        ([[0, -1]], "-1 in"),
        ([[a, b] for a in range(20) for b in range(20)], "choices has 420 nodes; the limit is 255"),
    ],
)
def test_choices_that_do_not_form_a_tree_are_refused(choices: object, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        MedusaParams(choices=Choices(choices))  # type: ignore[arg-type]
    if isinstance(choices, str):
        with pytest.raises(InvalidParameter, match=message):
            MedusaParams(choices=choices)
        with pytest.raises(InvalidParameter, match=message):
            parse_method(f"medusa:choices={choices}")


def test_the_best_tree_is_as_good_as_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        accuracy = rng.random((2, 3)).astype(np.float32) * 0.6
        everything = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
        for n in (1, 3, 5):
            trees = [
                some
                for some in combinations(everything, n)
                if all(path[:-1] in ((), *some) for path in some)
            ]
            best = max(expected_tokens(accuracy, some) for some in trees)
            ours = best_tree(accuracy, n)
            assert ours in [tuple(sorted(tree, key=lambda p: (len(p), p))) for tree in trees]
            assert expected_tokens(accuracy, ours) == pytest.approx(best)


def test_a_choice_that_is_never_accepted_is_not_drafted() -> None:
    accuracy = np.array([[0.5, 0.0], [0.2, 0.0]], np.float32)
    assert best_tree(accuracy, 10) == ((0,), (0, 0))
    assert expected_tokens(accuracy, ((0,), (0, 0))) == pytest.approx(1.6)


# The drafter


def drafted(params: MedusaParams, floor: float = 0.0) -> TokenTree:
    """The tree of the second step of a text, on the fake target's states."""
    bonus = int(fake_logits((1, 2, 3)).argmax())
    return second_tree(Medusa(params, FakeHeads()), bonus, floor)


def test_the_tree_has_the_chosen_ranks_of_each_head() -> None:
    tree = drafted(MedusaParams(choices="0.0/1"))
    (heads,) = FakeHeads().top([(fake_hidden((1, 2, 3)), 2)])
    tokens = [[token for token, _ in choices] for choices in heads]
    assert tree.tokens[1:] == [tokens[0][0], tokens[0][1], tokens[1][0]]
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
    best, _ = heads.top([(fake_hidden((1, 2, 3)), 1)])[0][0][0]
    medusa.observe(Step(TokenTree(4), state, [0], best))
    assert acceptance.prob(5) > acceptance.prob(3)  # its first choice had 0.5, its second 0.3


def test_a_state_from_another_position_is_not_used() -> None:
    check_that_a_gap_is_noticed(Medusa(MedusaParams(), FakeHeads()))


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="choices go 5 deep, but there are only 4 heads"):
        Medusa(MedusaParams(choices="0.0.0.0.0"), FakeHeads())


def test_the_name_of_medusa_shows_its_parameters_and_that_it_is_lossy() -> None:
    assert str(parse_method("medusa:choices=0.0/0/1")) == "medusa:choices=0.0/1"
    for params, reason in (
        ("verify=typical", "verify is 'typical'; give match or typical-lossy"),
        ("verify=rejection", "verify is 'rejection'; give match or typical"),
        ("choices=0,nodes=3", "choices and nodes are both set"),
    ):
        with pytest.raises(InvalidParameter, match=reason):
            parse_method(f"medusa:{params}")


# Typical acceptance


class Temperature:
    """A sampler at temperature 1 that chooses the most likely token."""

    reads_logits = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def probabilities(self, logits: Floats) -> Floats:
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def accept(self, token: int) -> None:
        self.seen.append(token)

    def sample(self, output: Output, row: int) -> int:
        return output.argmax(row)


def typical_path(rows: list[list[float]], epsilon: float, delta: float) -> list[int]:
    """The path through a tree 0 -> (1 -> 3, 2) whose drafts are the tokens 0, 1, 2."""
    tree = TokenTree(9)
    first = tree.add(0, 0)
    tree.add(0, 1)
    tree.add(first, 2)
    output = FakeOutput(
        [(row,) for row in range(4)],
        [True] * 4,
        lambda prefix: np.log(np.array(rows[prefix[0]], np.float32)),
    )
    sampler = Temperature()
    path, _ = Typical(epsilon, delta).verify(tree, output, sampler)
    assert sampler.seen == [tree.tokens[node] for node in path[1:]]
    return path


def test_typical_acceptance_takes_the_longest_path_that_is_likely_enough() -> None:
    even, sure = [0.34, 0.33, 0.33], [0.01, 0.98, 0.01]
    # Entropy 1.1 nats: the threshold is min(0.09, 0.3 / 3) = 0.09.
    assert typical_path([even, even, even, even], 0.09, 0.3) == [0, 1, 3]
    assert typical_path([even, sure, even, even], 0.09, 0.3) == [0, 1]
    assert typical_path([sure, even, even, even], 0.09, 0.3) == [0, 2]
    assert typical_path([even, even, even, even], 0.5, 0.9) == [0, 1, 3]  # 0.9 / 3 = 0.3
    assert typical_path([even, even, even, even], 0.5, 1.0) == [0, 1]  # 1 / 3 is above 0.33


# Real decoding

METHODS = ("medusa", "medusa:choices=0.0.0/1.1/2/3", "medusa:nodes=6", "auto:sources=medusa")


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
            if method == "medusa" and plain.stats.n_tokens > 5 and not is_held:
                assert ours.stats.n_drafted == 6 * (ours.stats.n_steps - 1)


def test_typical_acceptance_equals_plain_decoding_only_at_temperature_zero(
    tmp_path: Path, tiny_model: Path
) -> None:
    # Zero residuals: every head applies the output matrix to the state itself.
    weights = replace(
        medusa_weights(), weights=np.zeros((1, 3, 32, 32), np.float32),
        biases=np.zeros((1, 3, 32), np.float32),
    )  # fmt: skip
    path = write_medusa_heads(tmp_path / "heads.gguf", tiny_model, weights)
    lossy = "medusa:verify=typical-lossy,epsilon=0.001,delta=0.001"
    with Engine.load(tiny_model, EXACT, heads=path) as engine:
        plain, _ = same_texts(engine, PROMPT, lossy, max_tokens=30)
        for changed in (
            SamplingParams(repeat_penalty=1.5, frequency_penalty=0.3),
            SamplingParams(logit_bias={plain.token_ids[0]: -math.inf, 270: 1.0}),
            SamplingParams(dry_multiplier=0.8),
            SamplingParams(grammar="root ::= [a-z ]+"),
        ):
            _, match, typical = same_texts(
                engine, PROMPT, "medusa", lossy, sampling=changed, max_tokens=60
            )
            assert typical.stats.n_accepted == match.stats.n_accepted
        hot = SamplingParams(temperature=1.5, seed=3)
        match = engine.generate(PROMPT, method="medusa", sampling=hot, max_tokens=60).run()
        typical = engine.generate(PROMPT, method=lossy, sampling=hot, max_tokens=60).run()
        assert typical.stats.acceptance_rate > match.stats.acceptance_rate
        schema: dict[str, Any] = {"temperature": 1.0, "json_schema": {"type": "object"}}
        with pytest.raises(InvalidParameter, match="use verify=match"):
            engine.generate(PROMPT, method=lossy, sampling=schema, max_tokens=30).run()
