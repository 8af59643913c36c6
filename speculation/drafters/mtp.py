"""MTP: a model's own layer for multi-token prediction drafts, here mostly chains.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437. The layer is a head over the
target's states, as EAGLE's is, and comes with the model's GGUF or as an assistant beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation.drafter import AsSource, MethodSpec
from speculation.drafting.head_drafter import GrownParams, HeadDrafter
from speculation.resources import Resources

KIND = "mtp"


@dataclass(frozen=True)
class MtpParams(GrownParams):
    """How far and how broadly the model's own prediction layer drafts, and what is kept of it.

    depth   levels: draft tokens in a row; the layer was trained for the first
    top_k   nodes of a level that are expanded, and drafts looked at below each
    nodes   draft tokens of the tree: of all candidates those with the likeliest paths
    p_min   least probability that the layer must give a draft; auto goes by costs instead
    window  tokens at the end of a prompt that the layer reads as well. 0 = none: drafting begins
            with the second step
    """

    depth: int = 6
    top_k: int = 1
    nodes: int = 24
    p_min: float = 0.75
    window: int = 1024


def _source_params(resources: Resources) -> MtpParams | None:
    return MtpParams(depth=8) if KIND in resources.heads else None


spec = MethodSpec(
    name="mtp",
    title="Multi-token prediction",
    params=MtpParams,
    make=lambda params, resources: HeadDrafter.over(
        KIND,
        params,
        resources,
        "mtp",
        what="a model with layers of its own for multi-token prediction, or a file of such layers,",
    ),
    as_source=AsSource(_source_params),
)
