"""DFlash: a head fills in a block of masked tokens at once, from the target's states.

Chen, Liang and Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv
2602.06036. The likeliest token of each place is a chain; with more of each the places are levels of
a tree, and its likeliest nodes are drafted (Ringel and Romano 2026, "Accelerating Speculative
Decoding with Block Diffusion Draft Trees", arXiv 2604.12989). Neither needs another decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation.drafter import AsSource, MethodSpec
from speculation.drafting.head_drafter import GrownParams, HeadDrafter
from speculation.resources import Resources

KIND = "dflash"


@dataclass(frozen=True)
class DFlashParams(GrownParams):
    """How much of a block is drafted, and what is kept of it.

    depth   draft tokens in a row, at most as many as a block of the head has: one less than its
            size, or all of it
    top_k   tokens looked at of each place, and paths that go on to the next: 1 = a chain
    nodes   draft tokens of the tree: of all that were looked at those with the likeliest paths
    p_min   least probability that the head must give a draft
    window  tokens at the end of a prompt that the head sees. 0 = none: drafting begins with the
            second step
    """

    depth: int = 15
    top_k: int = 1
    nodes: int = 24
    p_min: float = 0.0
    window: int = 8192


def _source_params(resources: Resources) -> DFlashParams | None:
    return DFlashParams(top_k=8, nodes=64) if KIND in resources.heads else None


spec = MethodSpec(
    name="dflash",
    title="DFlash",
    params=DFlashParams,
    # A deeper level of a block takes no further decode, so drafting time has no say in the depth.
    make=lambda params, resources: HeadDrafter.over(KIND, params, resources, "dflash", timed=False),
    as_source=AsSource(_source_params),
)
