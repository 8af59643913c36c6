"""ReDrafter: the recurrent head, its beams and its training."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from batching.tree import Floats, TokenTree
from speculation.drafting.acceptance import Acceptance, of_probability
from speculation.drafting.tree_growth import Growth
from speculation.heads.base import silu
from speculation.heads.file import HeadsWeights
from speculation.heads.redrafter import Beams, ReDrafterHead
from speculation.methods.redrafter import ReDrafter, ReDrafterParams
from tests.support.fake_methods import FakeReDrafterHead
from tests.support.fake_target import N_VOCAB, fake_hidden
from tests.support.head_checks import second_tree
from tests.support.tiny_gguf import N_TINY
from tests.support.tiny_heads import matrix, redrafter_weights

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


def test_beams_of_several_texts_advance_each_from_its_own_state() -> None:
    w = redrafter_weights(n_blocks=2, tokens=[3, 300, 17, 5, 270])
    embeddings, t = matrix(N_TINY, 32), w.tensors
    hidden = np.random.default_rng(2).standard_normal(32).astype(np.float32)

    def expected(*path: int) -> Floats:
        """The logits after a path, by the paper's recurrence from its beginning."""
        state = np.zeros(32, np.float32)
        for token in path:
            inner = t["token.weight"] @ embeddings[token] + t["recurrent.weight"] @ state
            state = silu(inner + t["recurrent.bias"])
        u = silu(t["mixing.weight"] @ np.concatenate([state, hidden]) + t["mixing.bias"])
        for i in range(2):
            u = u + silu(t[f"block.{i}.weight"] @ u + t[f"block.{i}.bias"])
        return w.output @ (hidden + t["projection.weight"] @ u)

    head = ReDrafterHead(w, lambda tokens: embeddings[list(tokens)])
    root, other = head.advance([Beams(hidden, [7], None), Beams(hidden + 1, [8, 2], None)])
    np.testing.assert_allclose(root.logits(0), expected(7), atol=2e-4)
    # Another text beside it changes nothing.
    _, level = head.advance([other.below([1], [5]), root.below([0, 0], [3, 9])])
    for row, path in enumerate([(7, 3), (7, 9)]):
        np.testing.assert_allclose(level.logits(row), expected(*path), atol=2e-4)
    (level,) = head.advance([level.below([1, 0, 1], [4, 5, 6])])
    for row, path3 in enumerate([(7, 9, 4), (7, 3, 5), (7, 9, 6)]):
        np.testing.assert_allclose(level.logits(row), expected(*path3), atol=2e-4)


# The beams


HIDDEN = fake_hidden((1, 2, 3))  # which second_tree drafts from


def drafted(params: ReDrafterParams, head: FakeReDrafterHead, floor: float = 0.0) -> TokenTree:
    """The tree of the second step of a text, whose last token is 5."""
    return second_tree(ReDrafter(params, head), 5, floor)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "a prefix is in the tree twice"
    return set(paths[1:])


def beams(head: FakeReDrafterHead, n_beams: int, length: int) -> list[tuple[int, ...]]:
    """Plain beam search: of all continuations of all beams the best are kept."""
    kept: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        found = []
        for score, path in kept:
            logits = head.after(HIDDEN, (5, *path)).astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum())
            found += [(score + log_probs[token], (*path, token)) for token in range(N_VOCAB)]
        kept = sorted(found, reverse=True)[:n_beams]
    return [path for _, path in kept]


@pytest.mark.parametrize(("n_beams", "length"), [(1, 4), (2, 3), (3, 3), (4, 4)])
def test_the_tree_merges_the_common_prefixes_of_the_beams(n_beams: int, length: int) -> None:
    for seed in range(5):
        head = FakeReDrafterHead(seed)
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
    head = FakeReDrafterHead()
    tree = drafted(ReDrafterParams(beams=12, length=2), head, floor=0.1)
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    paths: list[tuple[int, ...]] = [()]
    for parent, token, prob in zip(tree.parents[1:], tree.tokens[1:], tree.probs[1:], strict=True):
        paths.append((*paths[parent], token))
        reached[paths[-1]] = reached[paths[parent]] * prob
    assert len(tree) > 1
    assert min(reached.values()) >= 0.1
    acceptance = Acceptance()  # before anything is learnt
    for path in product(range(N_VOCAB), repeat=2):
        likely = 1.0
        for i, token in enumerate(path):
            logits = head.after(HIDDEN, (5, *path[:i]))
            prob = float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())
            likely *= acceptance.prob(of_probability(prob))
        assert (path in reached) == (likely >= 0.1)


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
