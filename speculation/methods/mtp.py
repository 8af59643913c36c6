"""MTP: drafts with the model's own multi-token-prediction layer, by default a chain.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437. Like EAGLE's, the layer is a
head on the target's states. It is part of the model's GGUF, or comes as a separate assistant file.
"""

from __future__ import annotations

from dataclasses import dataclass

from batching.tree import NO_LIMIT
from speculation.drafter import AsSource, MethodSpec
from speculation.drafting.head_drafter import MAX_DEPTH, MAX_WIDTH, WINDOW, GrownParams, HeadDrafter
from speculation.drafting.resources import if_loaded
from speculation.heads.mtp import ASSISTANT, KIND
from speculation.system.params import param


@dataclass(frozen=True)
class MtpParams(GrownParams):
    """The size of the tree."""

    depth: int = param(
        6, "levels: draft tokens in a row; the layer was trained for the first", (1, MAX_DEPTH)
    )
    top_k: int = param(1, "nodes expanded per level, and candidates below each", (1, MAX_WIDTH))
    p_min: float = param(
        0.75,
        "minimum probability the layer must give a draft; auto decides by cost instead",
        (0.0, 1.0),
    )
    window: int = param(1024, WINDOW, (0, NO_LIMIT))


spec = MethodSpec(
    name="mtp",
    title="Multi-token prediction",
    params=MtpParams,
    make=lambda params, resources: HeadDrafter.for_head(
        KIND.method,
        params,
        resources,
        "mtp",
        what="a model with multi-token-prediction layers, or a file of such layers,",
    ),
    as_source=AsSource(if_loaded(KIND.method, MtpParams(depth=8))),
    heads=(KIND, ASSISTANT),
)
