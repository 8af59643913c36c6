"""Random heads in this project's own files, and models with heads of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads import medusa, redrafter
from speculation.heads.eagle import EagleShape, write_eagle
from speculation.heads.file import HeadsInfo, HeadsWeights
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
) -> HeadsWeights:
    normal = normal_weights(np.random.default_rng(seed), n_embd, scale)
    shapes = medusa.shapes(n_heads, n_blocks, n_embd)
    return heads_weights(normal, shapes, N_TINY if tokens is None else len(tokens), tokens)


def heads_weights(
    normal: Callable[..., Floats],
    shapes: Mapping[str, Sequence[int]],
    n_drafted: int,
    tokens: Sequence[int] | None,
) -> HeadsWeights:
    return HeadsWeights(
        {name: normal(*shape) for name, shape in shapes.items()},
        normal(n_drafted, 32),
        None if tokens is None else np.array(tokens, np.int32),
    )


def write_medusa_heads(path: Path, target: Path, weights: HeadsWeights | None = None) -> Path:
    with Model(target) as model:
        info = HeadsInfo.of_target("medusa", model)
        medusa.write_medusa(path, info, weights or medusa_weights())
    return path


def redrafter_weights(
    *, n_embd: int = 32, n_blocks: int = 1, tokens: Sequence[int] | None = None
) -> HeadsWeights:
    normal = normal_weights(np.random.default_rng(0), n_embd, scale=2)
    shapes = redrafter.shapes(n_embd, n_blocks)
    return heads_weights(normal, shapes, N_TINY if tokens is None else len(tokens), tokens)


def write_redrafter_head(path: Path, target: Path, weights: HeadsWeights | None = None) -> Path:
    with Model(target) as model:
        info = HeadsInfo.of_target("redrafter", model)
        redrafter.write_redrafter(path, info, weights or redrafter_weights())
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
