"""Random heads in this project's own files, and models with heads of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads.eagle import EagleShape, write_eagle
from speculation.heads.file import HeadsInfo
from speculation.heads.medusa import MedusaWeights, write_medusa
from speculation.heads.redrafter import ReDrafterWeights, write_redrafter
from tests.support.head_checks import normal_weights, random_weights
from tests.support.mtp_gguf import (
    write_assistant_gguf,
    write_gemma_gguf,
    write_mtp_gguf,
    write_mtp_gguf_with_kv,
)
from tests.support.tiny_dflash import write_counting_gguf, write_counting_head
from tests.support.tiny_eagle3 import write_tiny_eagle3
from tests.support.tiny_gguf import N_TINY, write_tiny_gguf

SHAPE = EagleShape(n_embd=32, n_head=4, n_head_kv=2, n_ff=64)


def medusa_weights(
    seed: int = 0,
    *,
    n_heads: int = 3,
    n_blocks: int = 1,
    n_embd: int = 32,
    tokens: Sequence[int] | None = None,
    scale: float = 1.0,
) -> MedusaWeights:
    normal = normal_weights(np.random.default_rng(seed), n_embd, scale)
    n_drafted = N_TINY if tokens is None else len(tokens)
    return MedusaWeights(
        normal(n_blocks, n_heads, n_embd, n_embd),
        normal(n_blocks, n_heads, n_embd),
        normal(n_drafted, n_embd),
        None if tokens is None else np.array(tokens, np.int32),
    )


def write_medusa_heads(path: Path, target: Path, weights: MedusaWeights | None = None) -> Path:
    with Model(target) as model:
        write_medusa(path, HeadsInfo.of_target("medusa", model), weights or medusa_weights())
    return path


def redrafter_weights(
    *,
    n_embd: int = 32,
    n_blocks: int = 1,
    n_drafted: int = N_TINY,
    tokens: Sequence[int] | None = None,
) -> ReDrafterWeights:
    normal = normal_weights(np.random.default_rng(0), n_embd, scale=2)
    return ReDrafterWeights(
        token=normal(n_embd, n_embd),
        recurrent=normal(n_embd, n_embd),
        bias=normal(n_embd),
        mixing=normal(n_embd, 2 * n_embd),
        mixing_bias=normal(n_embd),
        blocks=normal(n_blocks, n_embd, n_embd),
        block_biases=normal(n_blocks, n_embd),
        projection=normal(n_embd, n_embd),
        output=normal(n_drafted if tokens is None else len(tokens), n_embd),
        tokens=None if tokens is None else np.array(tokens, np.int32),
    )


def write_redrafter_head(path: Path, target: Path, weights: ReDrafterWeights | None = None) -> Path:
    with Model(target) as model:
        write_redrafter(
            path, HeadsInfo.of_target("redrafter", model), weights or redrafter_weights()
        )
    return path


def eagle_tensors(shape: EagleShape = SHAPE, seed: int = 0) -> dict[str, Floats]:
    return random_weights(shape.tensors, seed)


def write_eagle_head(
    path: Path,
    target: Path,
    *,
    shape: EagleShape = SHAPE,
    seed: int = 0,
    tokens: Sequence[int] | None = None,
    kind: str = "f32",
) -> Path:
    with Model(target) as model:
        info = HeadsInfo.of_target("eagle", model)
    some = None if tokens is None else np.array(tokens, np.int32)
    write_eagle(path, info, shape, eagle_tensors(shape, seed), tokens=some, kind=kind)
    return path


# A model with its heads, and methods that use them


def states(folder: Path) -> tuple[Path, list[Path], list[str]]:
    target = write_tiny_gguf(folder / "target.gguf", n_layer=4)
    heads = [
        write_eagle_head(folder / "eagle.gguf", target),
        write_tiny_eagle3(folder / "eagle3.gguf"),
        write_medusa_heads(folder / "medusa.gguf", target),
        write_redrafter_head(folder / "redrafter.gguf", target),
    ]
    methods = ["eagle-1", "eagle-2", "eagle-3", "medusa", "redrafter", "draft:p_min=0.02", "auto"]
    return target, heads, methods


def blocks(folder: Path) -> tuple[Path, list[Path], list[str]]:
    target = write_counting_gguf(folder / "target.gguf", influence=0.08)
    return target, [write_counting_head(folder / "head.gguf")], ["dflash", "dflash:top_k=4", "auto"]


def mtp(folder: Path) -> tuple[Path, list[Path], list[str]]:
    return write_mtp_gguf_with_kv(folder / "mtp.gguf"), [], ["mtp", "mtp:top_k=3,p_min=0", "auto"]


def hybrid(folder: Path) -> tuple[Path, list[Path], list[str]]:
    return write_mtp_gguf(folder / "mtp.gguf"), [], ["mtp:p_min=0", "mtp:depth=2,p_min=0", "auto"]


def attached(folder: Path) -> tuple[Path, list[Path], list[str]]:
    target = write_gemma_gguf(folder / "gemma.gguf")
    return target, [write_assistant_gguf(folder / "a.gguf", target)], ["mtp:p_min=0", "auto"]
