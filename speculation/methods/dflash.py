"""DFlash: a head fills in a block of masked tokens in one decode, from the target's states.

Chen, Liang and Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv
2602.06036. The likeliest token at each position forms a chain. With several per position, the
positions are the levels of a tree, whose likeliest nodes are drafted (Ringel and Romano 2026,
"Accelerating Speculative Decoding with Block Diffusion Draft Trees", arXiv 2604.12989). Neither
needs another decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from batching.tree import NO_LIMIT
from speculation.drafter import AsSource, MethodSpec
from speculation.drafting.head_drafter import MAX_DEPTH, MAX_WIDTH, WINDOW, GrownParams, HeadDrafter
from speculation.drafting.resources import if_loaded
from speculation.heads.dflash import KIND
from speculation.system.params import param


@dataclass(frozen=True)
class DFlashParams(GrownParams):
    """The size of the tree drafted from a block."""

    depth: int = param(
        15, "draft tokens in a row, at most one less than the head's block has", (1, MAX_DEPTH)
    )
    top_k: int = param(
        1, "candidates per position, and paths continued to the next: 1 = a chain", (1, MAX_WIDTH)
    )
    window: int = param(8192, WINDOW, (0, NO_LIMIT))


spec = MethodSpec(
    name="dflash",
    title="DFlash",
    params=DFlashParams,
    # All levels come from one decode, so drafting time does not limit the depth.
    make=lambda params, resources: HeadDrafter.for_head(
        KIND.method, params, resources, "dflash", timed=False
    ),
    as_source=AsSource(if_loaded(KIND.method, DFlashParams(top_k=8, nodes=64))),
    heads=(KIND,),
)
