"""Rejection sampling keeps the target's distribution: chi-square against direct sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from batching.target import Output
from batching.target import Sampler as TargetSampler
from batching.tree import Floats, TokenTree
from speculation.verify import Rejection, draw
from tests.support.scripted import ScriptedOutput

N_VOCAB = 5
N_DRAWS = 100_000


def logits_after(prefix: tuple[int, ...], salt: int) -> Floats:
    return np.random.default_rng([salt, *prefix]).standard_normal(N_VOCAB).astype(np.float32) * 1.5


def distribution(logits: Floats, temperature: float, top_k: int, top_p: float) -> Floats:
    """Softmax at a temperature, cut to the ``top_k`` likeliest and to the nucleus ``top_p``."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = p.argsort()[::-1]
    kept = order[:top_k]
    n = int(np.searchsorted(np.cumsum(p[kept]) / p[kept].sum(), top_p)) + 1
    cut: Floats = np.zeros(N_VOCAB, np.float32)
    cut[kept[:n]] = p[kept[:n]]
    return cut / cut.sum()


class Sampler:
    reads_logits = True

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        self.settings = temperature, top_k, top_p
        self.known: dict[bytes, Floats] = {}

    def sample(self, output: Output, row: int) -> int:
        raise AssertionError("rejection draws itself")

    def probabilities(self, logits: Floats) -> Floats:
        key = logits.tobytes()
        if key not in self.known:
            self.known[key] = distribution(logits, *self.settings)
        return self.known[key]

    def accept(self, token: int) -> None:
        pass


class PrefixOutput(ScriptedOutput):
    """Logits follow from the path to each node."""

    def __init__(self, tree: TokenTree, cache: dict[tuple[int, ...], Floats]) -> None:
        super().__init__()
        self.tree, self.cache = tree, cache

    def logits(self, row: int) -> Floats:
        prefix = tuple(self.tree.tokens[node] for node in self.tree.path_to(row)[1:])
        if prefix not in self.cache:
            self.cache[prefix] = logits_after(prefix, salt=1)
        return self.cache[prefix]


def sampled_tree(
    shape: Sequence[int], draft: Sampler, cache: dict[tuple[int, ...], Floats],
    rng: np.random.Generator,
) -> TokenTree:  # fmt: skip
    """``shape[d]`` children below every node of depth d, each an independent sample of q."""
    tree = TokenTree(0)
    level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for n_children in shape:
        below = []
        for node, prefix in level:
            if prefix not in cache:
                cache[prefix] = logits_after(prefix, salt=2)
            q = draft.probabilities(cache[prefix])
            for _ in range(n_children):
                token = draw(q, rng)
                child = tree.add(node, token, merge=False, draft_probs=q)
                below.append((child, (*prefix, token)))
        level = below
    return tree


def expected(n_tokens: int, sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of ``n_tokens`` under the target."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n_tokens):
        found = {
            (*prefix, token): p * float(q)
            for prefix, p in found.items()
            for token, q in enumerate(sampler.probabilities(logits_after(prefix, salt=1)))
            if q > 0
        }
    return found


def chi_square_excess(
    counts: dict[tuple[int, ...], int], wanted: dict[tuple[int, ...], float], n: int
) -> float:
    """How many standard deviations chi-square lies above its mean; cells under 5 are pooled."""
    assert set(counts) <= set(wanted), "a token of probability zero was drawn"
    chi, cells, rest_seen, rest_wanted = 0.0, 0, 0, 0.0
    for key, p in wanted.items():
        if n * p < 5:
            rest_seen, rest_wanted = rest_seen + counts.get(key, 0), rest_wanted + n * p
        else:
            chi += (counts.get(key, 0) - n * p) ** 2 / (n * p)
            cells += 1
    if rest_wanted >= 5:
        chi += (rest_seen - rest_wanted) ** 2 / rest_wanted
        cells += 1
    freedom = max(1, cells - 1)
    return (chi - freedom) / math.sqrt(2 * freedom)


def excess_of(
    shape: Sequence[int], p: tuple[float, int, float], q: tuple[float, int, float], n_tokens: int,
    n_draws: int, verifier: Rejection,
) -> float:  # fmt: skip
    """Draw texts of ``n_tokens`` with speculation and compare them with the target."""
    target, draft, rng = Sampler(*p), Sampler(*q), np.random.default_rng(3)
    target_cache: dict[tuple[int, ...], Floats] = {}
    draft_cache: dict[tuple[int, ...], Floats] = {}
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(n_draws):
        tree = sampled_tree(shape, draft, draft_cache, rng)
        path, bonus = verifier.verify(tree, PrefixOutput(tree, target_cache), target)
        text = (*(tree.tokens[node] for node in path[1:]), bonus)
        while len(text) < n_tokens:  # tokens beyond the step are drawn directly
            if text not in target_cache:
                target_cache[text] = logits_after(text, salt=1)
            text = (*text, draw(target.probabilities(target_cache[text]), rng))
        counts[text[:n_tokens]] = counts.get(text[:n_tokens], 0) + 1
    return chi_square_excess(counts, expected(n_tokens, target), n_draws)


WIDE, SHARP, CUT = (1.0, N_VOCAB, 1.0), (0.6, N_VOCAB, 1.0), (1.3, 3, 0.9)


@pytest.mark.parametrize(
    ("shape", "p", "q", "n_tokens"),
    [
        ((1,), WIDE, WIDE, 1),
        ((1, 1), SHARP, WIDE, 2),
        ((1, 1), CUT, CUT, 3),
        ((3,), WIDE, SHARP, 1),
        ((2, 2), CUT, WIDE, 2),
    ],
)
def test_rejection_samples_from_the_target_whatever_the_draft(
    shape: tuple[int, ...], p: tuple[float, int, float], q: tuple[float, int, float], n_tokens: int
) -> None:
    # The full 100,000 draws of each are run by `python -m tests.speculation.test_verify`.
    assert excess_of(shape, p, q, n_tokens, 8_000, Rejection(seed=5)) < 4.0


class NoResidual(Rejection):
    """A wrong rule: after a rejection it draws from the unchanged p."""

    def verify(
        self, tree: TokenTree, output: Output, sampler: TargetSampler
    ) -> tuple[list[int], int]:
        for child in tree.drafts().get(0, ()):
            q = tree.draft_probs[child]
            p = sampler.probabilities(output.logits(0))
            if self._random.random() * q[tree.tokens[child]] < p[tree.tokens[child]]:
                return [0, child], draw(sampler.probabilities(output.logits(child)), self._random)
        return [0], draw(sampler.probabilities(output.logits(0)), self._random)


def test_the_chi_square_test_detects_a_wrong_rule() -> None:
    assert excess_of((1,), WIDE, SHARP, 1, 8_000, NoResidual(seed=5)) > 10.0


def test_a_certain_draft_is_counted_and_what_is_no_draft_never_accepted() -> None:
    sampler = Sampler(*WIDE)
    counts: dict[tuple[int, ...], int] = {}
    tree = TokenTree(0)
    tree.add(0, 2)
    cache: dict[tuple[int, ...], Floats] = {}
    verifier = Rejection(seed=1)
    for _ in range(8_000):
        path, bonus = verifier.verify(tree, PrefixOutput(tree, cache), sampler)
        first = (2,) if len(path) > 1 else (bonus,)
        counts[first] = counts.get(first, 0) + 1
    assert chi_square_excess(counts, expected(1, sampler), 8_000) < 4.0
    tree = TokenTree(0)
    tree.add_nodes([0], [3], [True], draft=False)
    path, _ = Rejection(seed=1).verify(tree, PrefixOutput(tree, {}), Sampler(*WIDE))
    assert path == [0]


def main() -> None:
    """The comparison in full: 100,000 draws for several shapes, temperatures and cuts."""
    settings = {
        "T=1": WIDE, "T=0.6": SHARP, "T=1.3, top-k 3, top-p 0.9": CUT, "T=0.3": (0.3, N_VOCAB, 1.0),
        "T=1, top-p 0.7": (1.0, N_VOCAB, 0.7),
    }  # fmt: skip
    for shape in ((1,), (1, 1), (1, 1, 1), (3,), (2, 2)):
        for name, p in settings.items():
            for n_tokens in range(1, len(shape) + 2):
                q = SHARP if p is WIDE else WIDE if p is SHARP else p
                excess = excess_of(shape, p, q, min(3, n_tokens), N_DRAWS, Rejection(seed=7))
                print(f"tree {shape}  {name}  first {min(3, n_tokens)} tokens  {excess:+.2f} sd")


if __name__ == "__main__":
    main()
