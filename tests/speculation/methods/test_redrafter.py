"""ReDrafter: the recurrent head, its beams, files, training and real decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.together import run
from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import Acceptance, of_probability
from speculation.drafting.tree_growth import Growth
from speculation.engine import Engine
from speculation.heads.file import HeadsWeights
from speculation.heads.redrafter import Beams, Level, ReDrafterHead
from speculation.methods import parse_method
from speculation.methods.redrafter import ReDrafter, ReDrafterParams
from tests.support.exact import EXACT
from tests.support.fake_target import FakeOutput, fake_logits
from tests.support.head_checks import check_that_a_gap_is_noticed, compared_texts, second_tree
from tests.support.tiny_gguf import N_TINY
from tests.support.tiny_heads import redrafter_weights, write_redrafter_head

# The forward pass


def test_every_token_advances_the_state_that_is_mixed_with_the_targets() -> None:
    tensors: dict[str, Floats] = {
        "token.weight": np.eye(2, dtype=np.float32),
        "recurrent.weight": np.array([[0, 1], [1, 0]], np.float32),
        "recurrent.bias": np.array([0, 1], np.float32),
        "mixing.weight": np.array([[1, 0, 0, 0], [0, 0, 0, 1]], np.float32),
        "mixing.bias": np.zeros(2, np.float32),
        "block.0.weight": np.zeros((2, 2), np.float32),
        "block.0.bias": np.zeros(2, np.float32),
        "projection.weight": np.array([[0, 1], [1, 0]], np.float32),
    }
    weights = HeadsWeights(
        tensors,
        output=np.array([[1, 0], [0, 1], [1, 1]], np.float32),
        tokens=None,
    )
    embeddings = np.array([[0, 0], [1, 0], [0, 2]], np.float32)
    head = ReDrafterHead(weights, lambda tokens: embeddings[list(tokens)])
    # Token 1: W e + b = (1, 1), SiLU(1) = 0.73106. A s + B h = (0.73106, -1), SiLU of it
    # u = (0.49348, -0.26894), and h + P u = (1 - 0.26894, -1 + 0.49348).
    root = head.advance([Beams(np.array([1, -1], np.float32), [1], None)])[0]
    np.testing.assert_allclose(root.logits(0), [0.73106, -0.50652, 0.22454], atol=1e-4)
    # Token 2 below it: W e + U s + b = (0.73106, 3.73106), SiLU (0.49348, 3.64369);
    # A s + B h = (0.49348, -1), u = (0.30641, -0.26894).
    below = head.advance([root.below([0], [2])])[0]
    np.testing.assert_allclose(below.logits(0), [0.73106, -0.69359, 0.03747], atol=1e-4)


@pytest.mark.parametrize("tokens", [None, [3, 300, 17, 5, 270]])
@pytest.mark.train
def test_the_logits_are_those_of_the_papers_recurrence(tokens: list[int] | None) -> None:
    torch = pytest.importorskip("torch")
    w = redrafter_weights(n_blocks=2, tokens=tokens)
    embeddings = np.random.default_rng(1).standard_normal((N_TINY, 32)).astype(np.float32)
    hidden = np.random.default_rng(2).standard_normal(32).astype(np.float32)

    def linear(weight: Floats, bias: Floats | None) -> object:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.weight.data = torch.from_numpy(weight)
        if bias is not None:
            layer.bias.data = torch.from_numpy(bias)
        return layer

    t = w.tensors
    weight = np.concatenate([t["token.weight"], t["recurrent.weight"]], axis=1)
    cell = linear(weight, t["recurrent.bias"])
    mixing = linear(t["mixing.weight"], t["mixing.bias"])
    blocks = [linear(t[f"block.{i}.weight"], t[f"block.{i}.bias"]) for i in range(2)]
    silu = torch.nn.SiLU()

    def reference(path: Sequence[int]) -> Floats:
        """The logits after a path, by the paper's recurrence from its beginning."""
        h, state = torch.from_numpy(hidden), torch.zeros(32)
        for token in path:
            state = silu(cell(torch.cat([torch.from_numpy(embeddings[token]), state])))  # type: ignore[operator]
        u = silu(mixing(torch.cat([state, h])))  # type: ignore[operator]
        for block in blocks:
            u = u + silu(block(u))  # type: ignore[operator]
        z = h + torch.from_numpy(t["projection.weight"]) @ u
        return (torch.from_numpy(w.output) @ z).detach().numpy()

    def look_up(ids: Sequence[int]) -> Floats:
        return embeddings[list(ids)]

    head = ReDrafterHead(w, look_up)
    start = Beams(hidden, [7], None)
    root, other = head.advance([start, Beams(hidden + 1, [8, 2], None)])
    np.testing.assert_allclose(root.logits(0), reference([7]), atol=2e-4)
    # Another text beside it changes nothing.
    _, level = head.advance([other.below([1], [5]), root.below([0, 0], [3, 9])])
    np.testing.assert_allclose(level.logits(0), reference([7, 3]), atol=2e-4)
    np.testing.assert_allclose(level.logits(1), reference([7, 9]), atol=2e-4)
    (level,) = head.advance([level.below([1, 0, 1], [4, 5, 6])])
    np.testing.assert_allclose(level.logits(0), reference([7, 9, 4]), atol=2e-4)
    np.testing.assert_allclose(level.logits(1), reference([7, 3, 5]), atol=2e-4)
    np.testing.assert_allclose(level.logits(2), reference([7, 9, 6]), atol=2e-4)


# The beams


class FakeHead(ReDrafterHead):
    """Logits of six tokens that depend only on the path since the text's last token."""

    tokens = None

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def after(self, path: Sequence[int]) -> Floats:
        return np.random.default_rng([self._seed, *path]).normal(0, 2, 6).astype(np.float32)

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        return [self._advance(*part) for part in parts]

    def _advance(self, hidden: Floats, tokens: Sequence[int], above: Any) -> Level:
        paths = np.empty(len(tokens), object)  # the state: the path from the root
        for i, token in enumerate(tokens):
            paths[i] = (token,) if above is None else (*above[i], token)
        return Level(np.stack([self.after(path) for path in paths]), paths, hidden)


def drafted(params: ReDrafterParams, head: FakeHead, floor: float = 0.0) -> TokenTree:
    """The tree of the second step of a text, whose last token is 5."""
    return second_tree(ReDrafter(params, head), 5, floor)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "a prefix is in the tree twice"
    return set(paths[1:])


def beams(head: FakeHead, n_beams: int, length: int) -> list[tuple[int, ...]]:
    """Plain beam search: of all continuations of all beams the best are kept."""
    kept: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        found = []
        for score, path in kept:
            logits = head.after((5, *path)).astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum())
            found += [(score + log_probs[token], (*path, token)) for token in range(6)]
        kept = sorted(found, reverse=True)[:n_beams]
    return [path for _, path in kept]


@pytest.mark.parametrize(("n_beams", "length"), [(1, 4), (2, 3), (3, 3), (4, 4)])
def test_the_tree_merges_the_common_prefixes_of_the_beams(n_beams: int, length: int) -> None:
    for seed in range(5):
        head = FakeHead(seed)
        tree = drafted(ReDrafterParams(beams=n_beams, length=length), head)
        expected = beams(head, n_beams, length)
        assert paths_of(tree) == {path[: i + 1] for path in expected for i in range(length)}


def test_the_top_beams_include_their_whole_paths() -> None:
    growth = Growth(0, Acceptance())
    assert growth.beams(2) == []
    growth.add_likely(0, [(1, 0.6), (2, 0.4)])
    growth.add_likely(1, [(3, 0.5)])
    growth.add_likely(2, [(4, 0.9)])
    growth.add_likely(1, [(5, 0.2)])
    assert growth.beams(1) == [2, 4]
    assert growth.beams(2) == [1, 2, 3, 4]


def test_a_least_path_probability_selects_exactly_the_paths_above_it() -> None:
    head = FakeHead()
    tree = drafted(ReDrafterParams(beams=6, length=2), head, floor=0.1)
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    paths: list[tuple[int, ...]] = [()]
    for parent, token, prob in zip(tree.parents[1:], tree.tokens[1:], tree.probs[1:], strict=True):
        paths.append((*paths[parent], token))
        reached[paths[-1]] = reached[paths[parent]] * prob
    assert len(tree) > 1
    assert min(reached.values()) >= 0.1
    acceptance = Acceptance()  # before anything is learnt
    for path in product(range(6), repeat=2):
        likely = 1.0
        for i, token in enumerate(path):
            logits = head.after((5, *path[:i]))
            prob = float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())
            likely *= acceptance.prob(of_probability(prob))
        assert (path in reached) == (likely >= 0.1)


def test_accepted_drafts_raise_the_confidence_in_the_head() -> None:
    head = FakeHead()
    acceptance = Acceptance()
    drafter = ReDrafter(ReDrafterParams(beams=1, length=1), head, acceptance=acceptance)
    logits = head.after((5,))
    cell = of_probability(float(1 / np.exp(logits - logits.max()).sum()))
    before = acceptance.prob(cell)
    state = FakeOutput([(1, 2, 3), (5,)], [True, True], fake_logits, True)
    drafter.begin([1, 2, 3])
    run(drafter.draft([1, 2, 3], TokenTree(3), DraftBudget()))
    drafter.observe(Step(TokenTree(3), state, [0], 5))
    tree = TokenTree(5)
    run(drafter.draft([1, 2, 3, 5], tree, DraftBudget()))
    drafter.observe(Step(tree, state, [0, 1], 4))
    assert acceptance.prob(cell) > before


def test_a_state_from_another_position_is_not_used() -> None:
    check_that_a_gap_is_noticed(ReDrafter(ReDrafterParams(), FakeHead()))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("redrafter:beams=0", "beams is 0"),
        ("redrafter:length=33", "length is 33"),
        ("redrafter:beams=64,length=32", "may be 2048 nodes; the limit is 255"),
    ],
)
def test_parameters_out_of_range_are_refused(method: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        parse_method(method)


# Real decoding

METHODS = ("redrafter", "redrafter:beams=1,length=2", "auto:sources=redrafter")


@pytest.mark.parametrize("n_drafted", [N_TINY, 100])
def test_any_head_gives_the_text_of_plain_decoding(
    tmp_path: Path, tiny_model: Path, n_drafted: int
) -> None:
    words = None if n_drafted == N_TINY else random.Random(0).sample(range(N_TINY), n_drafted)
    weights = redrafter_weights(tokens=words)
    path = write_redrafter_head(tmp_path / "head.gguf", tiny_model, weights)
    with Engine.load(tiny_model, EXACT, heads=path) as engine:
        for method, plain, ours in compared_texts(engine, METHODS, max_tokens=50):
            is_held = plain.request.sampling.has_structure  # then drafts are dropped
            if method == METHODS[1] and plain.finish_reason == "length" and not is_held:
                # Not in the first step; in the last two one token is left, and none.
                assert ours.stats.n_drafted == 2 * (ours.stats.n_steps - 3) + 1


# Training


@pytest.mark.train
def test_the_training_loss_of_a_chain_matches_drafting_it_token_by_token(tmp_path: Path) -> None:
    """Training must compute for each token of a chain what the head computes when it drafts."""
    torch = pytest.importorskip("torch")
    from speculation.train.params import ReDrafterTraining
    from speculation.train.redrafter import ReDrafterModule
    from speculation.train.sequences import Sequences
    from speculation.train.texts import Sample
    from tests.support.train_data import collected

    rng = np.random.default_rng(0)
    tokens, choices = rng.integers(0, 20, (2, 12)).tolist()
    samples = [Sample(tokens[:7], [(3, 7)]), Sample(tokens[7:])]
    found = collected(tmp_path, samples, rng.standard_normal((12, 8)), choices)
    embeddings = rng.standard_normal((20, 8)).astype(np.float32)
    output = torch.from_numpy(rng.standard_normal((20, 8)).astype(np.float32))
    model = ReDrafterModule(ReDrafterTraining(), 8, 1.0)
    head = ReDrafterHead(model.weights(output, None), lambda tokens: embeddings[list(tokens)])
    batch = Sequences(found, "cpu", embeddings, found.hidden).batch([0, 1])
    with torch.inference_mode():
        chains = [(p.tolist(), (ours @ output.T).numpy()) for p, ours in model.chains(batch, 3)]
    # Chains of up to three start from the states at 1 to 4 and at 7 to 9 with the token after each.
    # They end where the sequence does. Each sequence takes six places.
    starts = {1: 1, 2: 2, 3: 3, 4: 4, 6: 7, 7: 8, 8: 9}
    assert chains[0][0] == list(starts)
    assert chains[1][0] == [2, 3, 4, 7, 8]
    assert chains[2][0] == [3, 4, 8]
    for i, (place, start) in enumerate(starts.items()):
        hidden = found.hidden[start].astype(np.float32)
        (rows,) = head.advance([Beams(hidden, [int(found.tokens[start + 1])], None)])
        np.testing.assert_allclose(rows.logits(0), chains[0][1][i], atol=1e-4)
        for depth in (1, 2):
            if place + depth in chains[depth][0]:
                (rows,) = head.advance([rows.below([0], [int(found.tokens[start + 1 + depth])])])
                at = chains[depth][0].index(place + depth)
                np.testing.assert_allclose(rows.logits(0), chains[depth][1][at], atol=1e-4)
