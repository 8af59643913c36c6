"""Detects GGUF files that llama.cpp cannot run, from what the file says.

Over many of them llama.cpp aborts the process: an assertion about a value fails, or a computation
has no code for a tensor's type. So these are looked for before the file is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batching.errors import UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names
from batching.gguf.types import F32, NOT_FOR_WEIGHTS, type_name

TEXT_MODEL = "choose a chat or text generation model"
# Files that go with a model, by general.type or architecture: what they are, and what to give.
PARTS = {
    "adapter": "a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora",
    "mmproj": "what a model sees or hears with; give the model that it came with",
    "clip": "what a model sees or hears with; give the model that it came with",
    "imatrix": "an importance matrix for quantising; give the model that it was made of",
    "controlvector": "a control vector; give the model that it was made of",
}
ALIGNMENT = 32  # bytes; ggml's TENSOR_ALIGNMENT, which mapped tensors must have
_BYTE = 6  # a token type
_NORM = re.compile(r"norm(_\d)?\.(weight|bias)")
_TABLE_OF_EXPERTS = "tid2eid.weight"  # whole numbers by right


class Limits(NamedTuple):
    """What llama.cpp accepts of a file: beyond it the process ends.

    n_layers, n_experts  at most
    rope_scaling         names of the ways to stretch positions
    dense                architectures of which files without experts may say that they have one
    """

    n_layers: int
    n_experts: int
    rope_scaling: tuple[str, ...]
    dense: tuple[str, ...]


def check_model_file(path: Path, limits: Limits) -> Sequence[GGUFFile]:
    """The files of a model, of which ``path`` is one; those that are missing are left out.

    Raises UnsupportedModel where llama.cpp would end the process over them, or it is no model;
    NotGGUF or TruncatedGGUF.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    files = [GGUFFile(part) for part in parts if part.is_file()]
    part = _part_of_model(files[0])
    if part is not None:
        raise UnsupportedModel(f"{path} is no model but {part}")
    for file in files:
        problem = next((p for check in _CHECKS for p in check(file, limits)), None)
        if problem is not None:
            raise UnsupportedModel(
                f"llama.cpp cannot run {file.path}: {problem}; the file may be damaged: download "
                f"it again, or choose another conversion of the model"
            )
    return files


def check_types(path: Path) -> None:
    """Raise UnsupportedModel for a tensor of a type that is not known, in any file of the model.

    Asked after llama.cpp refused the file: a newer one may know types that are not known here.
    """
    for part in (path.with_name(name) for name in part_names(path.name)):
        if part.is_file():
            file = GGUFFile(part)
            for name in file.tensors:
                file.check_type(name)


def _part_of_model(file: GGUFFile) -> str | None:
    """What a file is that goes with a model, and what to give instead."""
    for key in ("general.type", "general.architecture"):
        value = file.metadata.get(key)
        if isinstance(value, str) and value in PARTS:
            return PARTS[value]
    if not file.tensors and file.number("split.count") < 2:
        return f"a vocabulary without weights; {TEXT_MODEL}"
    return None


def _wrong_numbers(file: GGUFFile, limits: Limits) -> Iterator[str]:
    """Values of the architecture that are out of range."""
    architecture = file.metadata.get("general.architecture")
    n_experts = file.number(f"{architecture}.expert_count")
    n_groups = file.number(f"{architecture}.expert_group_count")
    if architecture in limits.dense and n_experts <= 1:
        n_experts = n_groups = 0
        used = None  # is not read
    else:
        used = file.metadata.get(f"{architecture}.expert_used_count", 0)
    # A value that is not there, or not a number, llama.cpp asks for in words.
    for key, value, least, most in (
        ("block_count", file.metadata.get(f"{architecture}.block_count"), 1, limits.n_layers),
        (
            "nextn_predict_layers",
            file.metadata.get(f"{architecture}.nextn_predict_layers"),
            0,
            file.number(f"{architecture}.block_count"),
        ),
        ("expert_count", n_experts, 0, limits.n_experts),
        ("expert_used_count", used, min(1, n_experts), n_experts),
        ("expert_group_count", n_groups, 0, max(0, n_experts - 1)),
        (
            "expert_group_used_count",
            file.number(f"{architecture}.expert_group_used_count") if n_groups > 1 else None,
            1,
            n_groups - 1,
        ),
    ):
        number = max(value, default=0) if isinstance(value, list) else value
        if isinstance(number, int) and not least <= number <= most:
            yield f"{architecture}.{key} is {number}, and {least} to {most} is possible"
    if n_groups > 1 and n_experts % n_groups:
        yield f"{architecture}.expert_count is {n_experts}, no multiple of {n_groups} groups"
    for key, value in file.metadata.items():
        if not (isinstance(value, float) and key.startswith(f"{architecture}.")):
            continue
        if math.isnan(value) or (key.endswith("epsilon") and not 0 <= value < math.inf):
            yield f"{key} is {value}"
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in limits.rope_scaling:
        yield (
            f"{architecture}.rope.scaling.type is {scaling!r}, and one of "
            f"{', '.join(limits.rope_scaling)} is possible"
        )


def _wrong_tokens(file: GGUFFile, limits: Limits) -> Iterator[str]:
    """A vocabulary that is of another tokenizer, or has a token twice."""
    types: Any = file.metadata.get("tokenizer.ggml.token_type")
    tokenizer = file.metadata.get("tokenizer.ggml.model")
    if tokenizer == "bert" and isinstance(types, list) and _BYTE in types:
        yield (
            f"tokenizer.ggml.model is {tokenizer!r}, and {types.count(_BYTE)} of the tokens are "
            f"bytes, as another tokenizer has them"
        )
    tokens = [token for token in file.texts("tokenizer.ggml.tokens") if token]
    if tokenizer not in ("none", "no_vocab") and len(set(tokens)) < len(tokens):
        seen: set[bytes] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        yield f"its vocabulary has the token {twice.decode('utf-8', 'replace')!r} twice"


def _wrong_tensors(file: GGUFFile, limits: Limits) -> Iterator[str]:
    """Tensors that no computation is written for, or that lie where they cannot be mapped."""
    for name, tensor in file.tensors.items():
        kind = type_name(tensor.type)
        is_weight = name.endswith((".weight", ".bias")) and not name.endswith(_TABLE_OF_EXPERTS)
        if is_weight and kind in NOT_FOR_WEIGHTS:
            yield f"tensor {name} is of type {kind}, which weights cannot have"
        elif _NORM.search(name) and tensor.type != F32:
            yield f"tensor {name} is of type {kind}, and norms must be F32"
        elif tensor.offset % ALIGNMENT:
            alignment = file.number("general.alignment", ALIGNMENT)
            yield (
                f"tensor {name} begins at byte {tensor.offset:,}, no multiple of {ALIGNMENT}; "
                f"general.alignment is {alignment}"
            )


_CHECKS: tuple[Callable[[GGUFFile, Limits], Iterator[str]], ...] = (
    _wrong_numbers,
    _wrong_tokens,
    _wrong_tensors,
)
