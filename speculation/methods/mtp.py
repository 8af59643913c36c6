"""MTP: drafts with the model's own multi-token-prediction layer, by default a chain.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437. Like EAGLE's, the layer is a
head on the target's states. It is part of the model's GGUF, or comes as a separate assistant file.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation.drafter import AsSource, MethodSpec
from speculation.drafting.head_drafter import GrownParams, HeadDrafter
from speculation.drafting.resources import if_loaded
from speculation.heads.mtp import ASSISTANT, KIND


@dataclass(frozen=True)
class MtpParams(GrownParams):
    """The size of the tree.

    depth   levels: draft tokens in a row; the layer was trained for the first
    p_min   minimum probability the layer must give a draft; auto decides by cost instead
    window  tokens at the end of a prompt that the layer reads. 0 = none: drafting starts with the
            second step
    """

    depth: int = 6
    top_k: int = 1
    nodes: int = 24
    p_min: float = 0.75
    window: int = 1024


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
