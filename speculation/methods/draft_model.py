"""Draft model: a small model with the same vocabulary drafts for the target.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318. The draft model has its own context, which follows
the text and is rolled back with it. Drafts are its likeliest tokens, as a chain or a tree, verified
by ``match``; or tokens sampled from q, verified by ``rejection``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from batching.draft_context import DraftContext
from batching.errors import CacheFull, InvalidParameter
from batching.together import Coroutine, own_time
from batching.tree import Floats, TokenTree
from speculation.drafter import AsSource, DraftBudget, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.confidence import LevelTime
from speculation.drafting.head_drafter import TreeDrafter
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import (
    Candidate,
    Candidates,
    best_nodes,
    grow,
    top_tokens,
)
from speculation.sampling import DraftDistribution
from speculation.system.params import Params, param
from speculation.verify import Match, Rejection, Verifier

VERIFIERS = ("match", "rejection")


@dataclass(frozen=True)
class DraftModelParams(Params):
    """The size of the draft, and how it is verified."""

    draft_max: int = param(16, "levels: draft tokens in a row", (1, 64))
    p_min: float = param(
        0.5, "drafting stops when the draft model's first choice is less probable", (0.0, 1.0)
    )
    p_path: float = param(
        0.4,
        "a chain also ends when its calibrated path probability falls below this: every row costs "
        "the same, and the last is the least likely",
        (0.0, 1.0),
    )
    width: int = param(
        1, "nodes per level: 1 drafts a chain, more a tree of the likeliest paths", (1, 16)
    )
    p_split: float = param(
        0.1, "minimum probability of a second or later choice, in a tree", (0.0, 1.0)
    )
    nodes: int = param(24, "draft tokens in a tree, likeliest paths first", (1, 63))
    verify: str = param(
        "match",
        "match accepts exactly the tokens the sampler chooses; rejection samples the drafts from q "
        "and accepts them with probability p / q",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify not in VERIFIERS:
            raise InvalidParameter(f"verify is {self.verify!r}; give {' or '.join(VERIFIERS)}")


class DraftModel(TreeDrafter):
    """Keeps the draft model's context in step with the text and drafts each step."""

    def __init__(
        self,
        params: DraftModelParams,
        context: DraftContext,
        *,
        acceptance: Acceptance | None = None,
        sampler: DraftDistribution | None = None,
        level_time: LevelTime | None = None,
        share: float = 0.0,
    ) -> None:
        """``context`` is the draft model's, shared by all texts.

        ``sampler`` samples the drafts from q; see the base classes for the rest.
        """
        super().__init__(acceptance, level_time)
        self.params, self.share = params, share
        branches = 0 if params.width == 1 else min(params.nodes, 60)
        self.requires = Requirements(branches=branches)
        self._context = context
        self._sampler = sampler
        self._is_full = False  # whether the context had no cells left for this text

    def begin(self, prompt: Sequence[int]) -> None:
        if self._sampler is not None:
            self._sampler.begin(prompt)
        self._context.begin(prompt, self.params.width)

    def n_unread(self, tokens: Sequence[int]) -> int:
        return self._context.n_unread(tokens)

    def observe(self, step: Step) -> None:
        super().observe(step)
        if self._sampler is not None:
            for token in step.tokens:
                self._sampler.accept(token)

    def promise(self, tokens: Sequence[int]) -> float | None:
        """Once the draft model's context is full, the text is decoded in plain steps."""
        params = self.params
        n_most = len(tokens) + params.draft_max * params.width
        return 0.0 if self._is_full or n_most >= self._context.target.n_ctx else None

    def end(self, tokens: Sequence[int]) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def _search(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> Coroutine[tuple[list[Candidate], Sequence[int]] | None]:
        context, params = self._context, self.params
        if self.promise(tokens) == 0.0 or budget.max_depth < 1:
            return None
        try:
            output = yield from context.root(tokens)
            self._began = own_time.now()
            nodes = yield from grow(
                partial(self._below, self._time.min_path_prob(budget)),
                context.level,
                output,
                context.root_row,
                depth=min(params.draft_max, budget.max_depth),
                width=context.n_leaves,
            )
        except CacheFull:  # other texts have its cells, and may have those of this one, too
            self._is_full = True
            context.keep(0, 1)
            return None
        max_nodes = min(params.nodes, budget.room(tree))
        if self._sampler is None:
            return nodes, best_nodes(nodes, max_nodes)
        # All siblings or none: the choice must not depend on the samples.
        return nodes, range(min(len(nodes), max_nodes - max_nodes % params.width))

    def _below(
        self, floor: float, nodes: Candidates, parent: int, logits: Floats
    ) -> list[Candidate]:
        """The drafts below a candidate."""
        width, sampler = self.params.width, self._sampler
        if sampler is None:
            return self._likely(floor, nodes, parent, top_tokens(logits, width))
        path, node = [], parent
        while node >= 0:
            path.append(nodes[node].token)
            node = nodes[node].parent
        q = sampler.probabilities(logits, path[::-1])
        # Whether to draft must not depend on the sample, or it no longer follows q.
        if float(q.max()) < self.params.p_min:
            return []
        parent_prob = 1.0 if parent < 0 else nodes[parent].path_prob
        drawn = [sampler.draw(q) for _ in range(width)]
        return [Candidate(parent, t, float(q[t]), parent_prob * float(q[t]), q) for t in drawn]

    def _likely(
        self, floor: float, nodes: Candidates, parent: int, top: Sequence[tuple[int, float]]
    ) -> list[Candidate]:
        """Those of the ``top`` tokens below ``parent`` that are likely enough to be drafted.

        With a ``floor``, those whose path probability reaches it. Without one, the first from
        ``p_min`` and others from ``p_split``; in a chain, ``p_path`` is a floor, too.
        """
        candidates: list[Candidate] = []
        params = self.params
        parent_prob = 1.0 if parent < 0 else nodes[parent].path_prob
        path_floor = floor or (params.p_path if params.width == 1 else 0.0)
        for token, prob in top:
            candidate = Candidate(parent, token, prob, 0.0)
            path_prob = parent_prob * self._confidence.acceptance_prob(candidate)
            min_prob = 0.0 if floor else params.p_split if candidates else params.p_min
            if prob >= min_prob and path_prob >= path_floor:
                candidates.append(candidate._replace(path_prob=path_prob))
        return candidates


def _make(params: DraftModelParams, resources: Resources) -> DraftModel:
    resources.require_draft("draft")
    make_sampler = resources.draft_sampler if _rejects(params, resources) else None
    share = resources.draft_share
    return DraftModel(
        params,
        resources.draft_context,
        acceptance=resources.acceptance("draft"),
        sampler=make_sampler() if make_sampler is not None else None,
        level_time=LevelTime.of("draft", resources, share),
        share=share,
    )


def _verifier(params: DraftModelParams, resources: Resources) -> Verifier:
    return Rejection(resources.sampling.seed) if _rejects(params, resources) else Match()


def _rejects(params: DraftModelParams, resources: Resources) -> bool:
    """Whether drafts are sampled. With greedy sampling, rejection is the same as match."""
    return params.verify == "rejection" and resources.sampling.temperature > 0


def _source_params(resources: Resources) -> DraftModelParams | None:
    if resources.draft is None:
        return None
    width = min(4, resources.draft.n_seq_max)
    return DraftModelParams(width=width if resources.rows_are_cheap else 1)


spec = MethodSpec(
    name="draft",
    title="Draft model",
    params=DraftModelParams,
    make=_make,
    verifier=_verifier,
    as_source=AsSource(_source_params),
)
