"""Draft-target speculation: a small model of the same vocabulary drafts for the target.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318. The draft model has a context of its own, which
follows the text and is rolled back with it. Drafts are the draft model's likeliest tokens, as a
chain or as a tree of the likeliest paths, checked by ``match``; or tokens sampled from q, checked
by ``rejection``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from batching.draft_context import DraftContext
from batching.errors import InvalidParameter
from batching.tree import Floats, TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.estimates import Estimates
from speculation.drafting.tree_growth import (
    Candidate,
    Candidates,
    add_to_tree,
    best_nodes,
    depths_of,
    grow,
    likeliest,
)
from speculation.ranges import check_ranges
from speculation.resources import Resources
from speculation.sampling import DraftSampler
from speculation.verify import Match, Rejection, Verifier

VERIFIERS = ("match", "rejection")
# How often the draft model's first choice is the target's, by q in tenths; set by judgement.
PRIORS = (0.08, 0.15, 0.25, 0.35, 0.42, 0.50, 0.58, 0.66, 0.76, 0.92)


@dataclass(frozen=True)
class DraftModelParams:
    """How far and how broadly the draft model drafts.

    draft_max  levels: draft tokens in a row
    draft_min  drafts of fewer tokens in a row are dropped, as llama.cpp does; for match alone,
               since what was drawn decides it
    p_min      drafting stops where the draft model's own first choice is less probable
    p_path     a chain also ends where all of it is less likely to hold, by what the draft model's
               word was worth so far: each row costs the same, and the last is the least likely
    width      nodes of a level: 1 drafts a chain, more a tree of the likeliest paths
    p_split    probability from which a further choice is drafted beside the first, in a tree
    nodes      draft tokens of a tree, the likeliest paths first
    verify     match accepts the very tokens the sampler chooses; rejection samples the drafts from
               q and accepts them with probability p / q
    """

    draft_max: int = 16
    draft_min: int = 0
    p_min: float = 0.5
    p_path: float = 0.4
    width: int = 1
    p_split: float = 0.1
    nodes: int = 24
    verify: str = "match"

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("draft_max", 1, 64),
                ("draft_min", 0, 64),
                ("p_min", 0.0, 1.0),
                ("p_path", 0.0, 1.0),
                ("width", 1, 16),
                ("p_split", 0.0, 1.0),
                ("nodes", 1, 63),
            ),
        )
        if self.draft_min > self.draft_max:
            raise InvalidParameter(
                f"draft_min {self.draft_min} is above draft_max {self.draft_max}; lower it"
            )
        if self.verify not in VERIFIERS:
            raise InvalidParameter(f"verify is {self.verify!r}; give {' or '.join(VERIFIERS)}")
        if self.draft_min and self.verify == "rejection":
            raise InvalidParameter(
                f"draft_min is {self.draft_min}: dropping short drafts depends on what was drawn, "
                "which would change the distribution; with verify=rejection give 0"
            )


class DraftModel(Drafter):
    """The draft model's context, in step with the text."""

    def __init__(
        self,
        params: DraftModelParams,
        levels: DraftContext,
        *,
        estimates: Estimates | None = None,
        sampler: DraftSampler | None = None,
        target_seconds: Callable[[], float] | None = None,
    ) -> None:
        """``levels`` holds the draft model's context and is shared with the texts before and after.

        ``sampler`` makes the drafts samples of q. ``target_seconds`` is what a step of the target
        costs: under a least path probability, drafting goes on only while it is worth its time.
        """
        self.params = params
        branches = 0 if params.width == 1 else min(params.nodes, 60)
        self.requires = Requirements(branches=branches)
        self._levels = levels
        self._estimates = estimates or Estimates(PRIORS)
        self._sampler = sampler
        self._target_seconds = target_seconds
        self._seconds = 0.0  # of a draft decode, on average
        self._first: list[tuple[int, float]] = []  # this step's likeliest path: token, q

    def begin(self, prompt: Sequence[int]) -> None:
        self._estimates.new_text()
        self._levels.begin(prompt, self.params.width)
        if self._sampler is not None:
            self._sampler.begin(prompt)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._first = []
        levels, params = self._levels, self.params
        if len(tokens) + params.draft_max * params.width >= levels.target.n_ctx:
            return  # the draft model's context is full: plain decoding from here on
        if budget.max_depth < 1:
            return  # the text's last token
        start = perf_counter()
        output, first = levels.root(tokens), levels.root_row
        nodes = grow(
            partial(self._children, self._least_path_prob(budget)),
            levels.level,
            output,
            first,
            depth=min(params.draft_max, budget.max_depth),
            width=params.width,
        )
        self._seconds += 0.1 * ((perf_counter() - start) / (1 + len(nodes)) - self._seconds)
        if nodes and max(depths_of(nodes)) >= params.draft_min:
            self._add(nodes, tree, budget)

    def observe(self, step: Step) -> None:
        became = step.tokens
        for (token, q), actual in zip(self._first, became, strict=False):
            self._estimates.learn(min(9, int(10 * q)), accepted=token == actual)
            if token != actual:
                break
        self._first = []
        if self._sampler is not None:
            for token in became:
                self._sampler.accept(token)

    def _least_path_prob(self, budget: DraftBudget) -> float:
        """Path probability below which another level is not worth its row and its own decode."""
        if not budget.min_path_prob or self._target_seconds is None:
            return 0.0
        return budget.min_path_prob + self._seconds / self._target_seconds()

    def _children(
        self,
        floor: float,
        nodes: Candidates,
        parent: int,
        logits: Floats,
    ) -> list[Candidate]:
        """The drafts below a candidate: the first choice if its probability is at least ``p_min``,
        and others beside it from ``p_split`` on; where ``floor`` is given, what has such a path.
        In a chain ``p_path`` is a floor beside ``p_min``."""
        reached = 1.0 if parent < 0 else nodes[parent].path_prob
        if self._sampler is not None:
            path = []
            node = parent
            while node >= 0:
                path.append(nodes[node].token)
                node = nodes[node].parent
            q = self._sampler.probabilities(logits, path[::-1])
            # Whether to draft must not depend on what is drawn, or the draft is no sample of q.
            if float(q.max()) < self.params.p_min:
                return []
            drawn = [self._sampler.draw(q) for _ in range(self.params.width)]
            return [Candidate(parent, t, float(q[t]), reached * float(q[t]), q) for t in drawn]
        found: list[Candidate] = []
        params = self.params
        least = floor or (params.p_path if params.width == 1 else 0.0)
        for token, prob in likeliest(logits, params.width):
            path_prob = reached * self._estimates.of(min(9, int(10 * prob)))
            needed = 0.0 if floor else params.p_split if found else params.p_min
            if prob >= needed and path_prob >= least:
                found.append(Candidate(parent, token, prob, path_prob, None))
        return found

    def _add(self, nodes: Candidates, tree: TokenTree, budget: DraftBudget) -> None:
        """Hang the likeliest candidates into the tree, parents first, and note the first path."""
        most = min(self.params.nodes, budget.room(tree))
        if self._sampler is None:
            chosen = best_nodes(nodes, most)
        else:  # siblings all or none: which are kept must not depend on what was drawn
            chosen = list(range(min(len(nodes), most - most % self.params.width)))
        placed = add_to_tree(nodes, chosen, tree, budget)
        follow = -1
        for c in chosen:
            if c in placed and nodes[c].parent == follow:
                self._first.append((nodes[c].token, nodes[c].prob))
                follow = c


def _make(params: DraftModelParams, resources: Resources) -> DraftModel:
    target = resources.require_draft("draft")
    make_sampler = resources.draft_sampler if _rejects(params, resources) else None
    return DraftModel(
        params,
        resources.keep("draft context", lambda: DraftContext(target)),
        estimates=resources.keep(("estimates", "draft"), lambda: Estimates(PRIORS)),
        sampler=make_sampler() if make_sampler is not None else None,
        target_seconds=resources.step_seconds,
    )


def _verifier(params: DraftModelParams, resources: Resources) -> Verifier:
    return Rejection(resources.sampling.seed) if _rejects(params, resources) else Match()


def _rejects(params: DraftModelParams, resources: Resources) -> bool:
    """Greedily, q and p are certain, and rejection is match."""
    return params.verify == "rejection" and resources.sampling.temperature > 0


def _source_params(resources: Resources) -> DraftModelParams | None:
    return DraftModelParams() if resources.draft is not None else None


spec = MethodSpec(
    name="draft",
    title="Draft model",
    params=DraftModelParams,
    make=_make,
    verifier=_verifier,
    as_source=AsSource(_source_params),
)
