"""Detects GGUF files that llama.cpp cannot run, before loading them.

llama.cpp aborts the process on many of them: an assertion on a value fails, or an operation has no
kernel for a tensor's type.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from batching.errors import UnsupportedModel
from batching.gguf.reader import GGUFFile, check_file
from batching.gguf.splits import part_names
from batching.gguf.types import F32, NOT_FOR_WEIGHTS, type_name

TEXT_MODEL = "choose a chat or text generation model"
# Companion files of a model, by general.type or architecture: what they are, and what to do.
COMPANIONS = {
    "adapter": "a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora",
    "mmproj": "an image or audio encoder; load the model it belongs to",
    "clip": "an image or audio encoder; load the model it belongs to",
    "imatrix": "an importance matrix for quantising; load the model it was made for",
    "controlvector": "a control vector; load the model it was made for",
}
ALIGNMENT = 32  # bytes; ggml's TENSOR_ALIGNMENT, required of mapped tensors
_BYTE = 6  # token type
_NORM = re.compile(r"norm(_\d)?\.(weight|bias)")
_EXPERT_TABLE = "tid2eid.weight"  # legitimately integer


# What this version of llama.cpp accepts (``private_api.CHECKED_WITH``); it aborts on others.
MAX_LAYERS, MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
ROPE_SCALING = ("none", "linear", "yarn", "longrope")  # llama_rope_scaling_type
# Architectures where one expert means none, and those without dense files (llama-model.cpp).
DENSE = ("hunyuan-dense", "hunyuan_vl")
EXPERTS = ("bailingmoe2", "glm4moe", "grovemoe", "lfm2moe", "llada-moe", "smallthinker")
# Numbers that may be absent, but not 0: of all architectures, and of some.
DIVISORS = (
    "attention.indexer.block_size attention.indexer.kpool experts_per_group "
    "full_attention_interval hrm.h_cycles hrm.l_cycles hrm.layers_per_stack num_loops wkv.head_size"
).split()
DIVISORS_OF = {
    "attention.head_count": "olmo2 phimoe",
    "ssm.group_count": "falcon-h1 granitehybrid mamba2 nemotron_h nemotron_h_moe qwen35 qwen35moe "
    "qwen3next",
}
# Architectures whose graphs read the number of heads of each layer; others take the first one's for
# all, and abort where the cache has room for another.
LAYERED = (
    "bailingmoe3 deci dots3note gemma4 gemma4-assistant glm5-next granite granite_swa "
    "granitehybrid granitemoe graniteswitch jamba kimi-k3 kimi-linear laguna lfm2 lfm2moe "
    "mimo2 nanbeige nemotron_h nemotron_h_moe openelm plamo2 plamo3 spark2_5 step35"
).split()


def check_model_file(path: Path) -> Sequence[GGUFFile]:
    """Check the model at ``path``; return its files, all parts of a split model that exist.

    Raises UnsupportedModel if it is not a model or llama.cpp would abort on it; ModelError
    if the file is missing, damaged or incomplete.
    """
    check_file(path)
    files = _files(path)
    companion = _companion(files[0])
    if companion is not None:
        raise UnsupportedModel(f"{path} is not a model but {companion}")
    for file in files:
        problem = next((p for check in _CHECKS for p in check(file)), None)
        if problem is not None:
            raise UnsupportedModel(
                f"llama.cpp cannot run {file.path}: {problem}; the file may be damaged: download "
                f"it again, or choose another conversion of the model"
            )
    return files


def check_types(path: Path) -> None:
    """Raise UnsupportedModel if any file of the model has a tensor of unknown type.

    Called only after llama.cpp rejected the file: a newer llama.cpp may support types not listed
    here.
    """
    for file in _files(path):
        for name in file.tensors:
            file.check_type(name)


def _files(path: Path) -> list[GGUFFile]:
    """The files of a model that exist: all of them, if it is split."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    return [GGUFFile(part) for part in parts if part.is_file()]


def _companion(file: GGUFFile) -> str | None:
    """What a file is, and what to do instead, if it only accompanies a model."""
    for key in ("general.type", "general.architecture"):
        value = file.metadata.get(key)
        if isinstance(value, str) and value in COMPANIONS:
            return COMPANIONS[value]
    if not file.tensors and file.number("split.count") < 2:
        return f"a vocabulary without weights; {TEXT_MODEL}"
    return None


def _metadata_problems(file: GGUFFile) -> Iterator[str]:
    """Hyperparameters out of range."""
    architecture = file.metadata.get("general.architecture")
    n_layers, n_experts, n_groups = (
        file.number(f"{architecture}.{key}_count") for key in ("block", "expert", "expert_group")
    )
    unread = [] if n_groups > 1 else ["expert_group_used_count"]  # by llama.cpp
    if architecture in DENSE and n_experts <= 1:
        n_experts = n_groups = 0
        unread = [f"expert_{name}" for name in ("count", "used_count", "group_count")]
        unread += ["expert_group_used_count"]
    # Missing and non-numeric values need no check: llama.cpp reports them without aborting.
    for key, low, high, missing in (
        ("block_count", 1, MAX_LAYERS, None),
        ("nextn_predict_layers", 0, n_layers, None),
        ("expert_count", int(architecture in EXPERTS), MAX_EXPERTS, 0),
        ("expert_used_count", min(1, n_experts), n_experts, 0),
        ("expert_group_count", 0, max(0, n_experts - 1), 0),
        ("expert_group_used_count", 1, n_groups - 1, 0),
    ):
        value = file.metadata.get(f"{architecture}.{key}", missing)
        number = max(value, default=0) if isinstance(value, list) else value
        if key not in unread and isinstance(number, int) and not low <= number <= high:
            yield f"{architecture}.{key} is {number}, outside {low} to {high}"
    of_some = [key for key, some in DIVISORS_OF.items() if architecture in some.split()]
    for key in DIVISORS + of_some:
        if file.metadata.get(f"{architecture}.{key}") == 0:
            yield f"{architecture}.{key} is 0"
    if n_groups > 1 and n_experts % n_groups:
        yield f"{architecture}.expert_count is {n_experts}, not a multiple of {n_groups} groups"
    for key, value in file.metadata.items():
        if not (isinstance(value, float) and key.startswith(f"{architecture}.")):
            continue
        if math.isnan(value) or (key.endswith("epsilon") and not 0 <= value < math.inf):
            yield f"{key} is {value}"
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in ROPE_SCALING:
        yield (
            f"{architecture}.rope.scaling.type is {scaling!r}, not one of {', '.join(ROPE_SCALING)}"
        )


def _head_problems(file: GGUFFile) -> Iterator[str]:
    """Numbers of attention heads that do not fit each other."""
    architecture = file.metadata.get("general.architecture")
    names = [f"{architecture}.attention.{name}" for name in ("head_count", "head_count_kv")]
    given = [file.metadata.get(name) for name in names]
    for name, value in zip(names, given, strict=True):
        if not isinstance(value, list) or architecture in LAYERED:
            continue
        if len(set(value)) > 1:
            yield f"{name} is {value[:8]}, but layers of {architecture} have equally many heads"
    lists = [value if isinstance(value, list) else [value] * 512 for value in given]
    for n_heads, n_kv in zip(*lists, strict=False):
        if not (isinstance(n_heads, int) and isinstance(n_kv, int)):
            return
        if n_kv < 0 or (n_kv > 0 and n_heads % n_kv):
            yield f"{names[0]} is {n_heads}, not a multiple of {names[1]}, which is {n_kv}"


def _template_problems(file: GGUFFile) -> Iterator[str]:
    """A chat template that is no text."""
    name = "tokenizer.chat_template"
    if isinstance(file.metadata.get(name), str):
        try:
            file.encoded_metadata()[name][12:].decode("utf-8")  # after its type and length
        except UnicodeDecodeError as error:
            yield f"{name} is not UTF-8 text ({error.reason} at byte {error.start})"


def _vocabulary_problems(file: GGUFFile) -> Iterator[str]:
    """Byte tokens in a BERT vocabulary, or duplicate tokens."""
    types: Any = file.metadata.get("tokenizer.ggml.token_type")
    tokenizer = file.metadata.get("tokenizer.ggml.model")
    if tokenizer == "bert" and isinstance(types, list) and _BYTE in types:
        yield (
            f"tokenizer.ggml.model is {tokenizer!r}, but {types.count(_BYTE)} of the tokens are "
            f"byte tokens, which that tokenizer does not have"
        )
    # llama.cpp reads a token up to its first NUL byte.
    given = file.texts("tokenizer.ggml.tokens")
    tokens = [read for token in given if (read := token.partition(b"\0")[0])]
    if tokenizer not in ("none", "no_vocab") and len(set(tokens)) < len(tokens):
        ((duplicate, _),) = Counter(tokens).most_common(1)
        text = duplicate.decode("utf-8", "replace")
        long = [token for token in given if token.startswith(duplicate + b"\0")]
        if long:
            whole = long[0].decode("utf-8", "replace")
            yield f"its vocabulary has the token {whole!r}, which has a NUL byte, beside {text!r}"
        yield f"its vocabulary has the token {text!r} twice"


def _tensor_problems(file: GGUFFile) -> Iterator[str]:
    """Tensors of a type without a kernel, or not aligned for mapping."""
    for name, tensor in file.tensors.items():
        kind = type_name(tensor.type)
        is_weight = name.endswith((".weight", ".bias")) and not name.endswith(_EXPERT_TABLE)
        if is_weight and kind in NOT_FOR_WEIGHTS:
            yield f"tensor {name} has type {kind}, which is not valid for weights"
        elif _NORM.search(name) and tensor.type != F32:
            yield f"tensor {name} has type {kind}, but norms must be F32"
        elif tensor.offset % ALIGNMENT:
            alignment = file.number("general.alignment", ALIGNMENT)
            yield (
                f"tensor {name} starts at byte {tensor.offset:,}, not a multiple of {ALIGNMENT}; "
                f"general.alignment is {alignment}"
            )


_CHECKS: tuple[Callable[[GGUFFile], Iterator[str]], ...] = (
    _metadata_problems,
    _head_problems,
    _template_problems,
    _vocabulary_problems,
    _tensor_problems,
)
