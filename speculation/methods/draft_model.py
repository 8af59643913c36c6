"""Draft model: a small model with the same vocabulary drafts for the target.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318. The draft model has its own context, which follows
the text and is rolled back with it. Drafts are its likeliest tokens, as a chain or a tree, verified
by ``match``; or tokens sampled from q, verified by ``rejection``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.draft_context import DraftContext
from batching.errors import CacheFull, InvalidParameter
from batching.together import Coroutine, own_time
from batching.tree import Floats
from speculation.drafter import AsSource, DraftBudget, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import Growth, LevelTime, TreeDrafter, top_tokens
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

    def _grow(
        self, growth: Growth, tokens: Sequence[int], budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        context, params = self._context, self.params
        if self.promise(tokens) == 0.0 or budget.max_depth < 1:
            return ()
        p_min, p_split = params.p_min, params.p_split
        if budget.min_path_prob:
            p_min = p_split = 0.0
        elif params.width == 1 and self._sampler is None:
            growth.floor = params.p_path

        def add_below(node: int, logits: Floats) -> None:
            if self._sampler is None:
                growth.add_likely(node, self._likeliest(growth, node, logits), p_min, p_split)
            else:
                self._sample(self._sampler, growth, node, logits)

        try:
            output = yield from context.root(tokens)
            self._began = own_time.now()
            yield from growth.levels(
                add_below,
                context.level,
                output,
                context.root_row,
                depth=min(params.draft_max, budget.max_depth),
                width=context.n_leaves,
            )
        except CacheFull:  # other texts have its cells, and may have those of this one, too
            self._is_full = True
            context.keep(0, 1)
            return ()
        n_nodes = min(params.nodes, budget.max_nodes)
        if self._sampler is None:
            return growth.likeliest(n_nodes)
        # All siblings or none: the choice must not depend on the samples.
        return range(1, len(growth.tree))[: n_nodes - n_nodes % params.width]

    def _likeliest(self, growth: Growth, node: int, logits: Floats) -> Sequence[tuple[int, float]]:
        """The likeliest tokens after a node."""
        return top_tokens(logits, self.params.width)

    def _sample(
        self, sampler: DraftDistribution, growth: Growth, node: int, logits: Floats
    ) -> None:
        tree = growth.tree
        path = [tree.tokens[above] for above in tree.path_to(node)[1:]]
        q = sampler.probabilities(logits, path)
        # Whether to draft must not depend on the sample, or it no longer follows q.
        if float(q.max()) >= self.params.p_min:
            for _ in range(self.params.width):
                token = sampler.draw(q)
                growth.add(node, token, float(q[token]), q)


def _make(params: DraftModelParams, resources: Resources) -> DraftModel:
    make_sampler, share = resources.draft_sampler, resources.draft_share
    return DraftModel(
        params,
        resources.require_draft("draft"),
        acceptance=resources.acceptance("draft"),
        sampler=make_sampler(resources.sampling)
        if make_sampler is not None and _rejects(params, resources)
        else None,
        level_time=LevelTime.of("draft", resources, share),
        share=share,
    )


def _verifier(params: DraftModelParams, resources: Resources) -> Verifier:
    return Rejection(resources.sampling.seed) if _rejects(params, resources) else Match()


def _rejects(params: DraftModelParams, resources: Resources) -> bool:
    """Whether drafts are sampled. With greedy sampling, rejection is the same as match."""
    return params.verify == "rejection" and resources.sampling.temperature > 0


def _source_params(resources: Resources) -> DraftModelParams | None:
    if (draft := resources.seat.draft) is None:
        return None
    width = min(4, draft.n_seq_max)
    return DraftModelParams(width=width if resources.rows_are_cheap else 1)


spec = MethodSpec(
    name="draft",
    title="Draft model",
    params=DraftModelParams,
    make=_make,
    verifier=_verifier,
    as_source=AsSource(_source_params),
)
