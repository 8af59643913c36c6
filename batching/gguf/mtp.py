"""What a GGUF has of layers for multi-token prediction (MTP; llama.cpp says nextn).

llama.cpp says how many its metadata speak of. Some converters leave the layers out and say so
nevertheless, some files hold nothing else, and over either it would end the process later.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names

# Architectures for whose layers llama.cpp has a graph …
ARCHITECTURES = (
    "bailingmoe3",
    "cohere2moe",
    "deepseek2",
    "deepseek32",
    "deepseek4",
    "glm-dsa",
    "glm4moe",
    "hy_v3",
    "mimo2",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "step35",
)
# … and those of them that may have several: over two of another's it would end the process.
WITH_SEVERAL = ("hy_v3", "mimo2", "step35")
# What it would end the process without, where MiMo-V2-Flash has three matrices; and what all have.
NEEDED = {"mimo2": "attn_qkv.weight"}
EVERY = "nextn.eh_proj.weight"


class MtpLayers(NamedTuple):
    """n_layers of them are there and can be run; ``alone`` says that the layers of the model itself
    are not there."""

    n_layers: int
    alone: bool


def find_mtp_layers(path: Path) -> MtpLayers:
    """Those in the file, or in the files that it is one of.

    Raises ModelFileMissing, NotGGUF or TruncatedGGUF.
    """
    files = [GGUFFile(path.with_name(name)) for name in part_names(path.name)]
    metadata = files[0].metadata
    architecture = metadata.get("general.architecture")
    n_layers = metadata.get(f"{architecture}.nextn_predict_layers", 0)
    first = metadata.get(f"{architecture}.block_count", 0) - n_layers

    def has(name: str) -> bool:
        return any(name in file.tensors for file in files)

    if not has(f"blk.{first}.{EVERY}"):
        return MtpLayers(0, alone=False)
    can_run = (
        architecture in ARCHITECTURES
        and (n_layers == 1 or architecture in WITH_SEVERAL)
        and has(f"blk.{first}.{NEEDED.get(architecture, EVERY)}")
    )
    return MtpLayers(n_layers if can_run else 0, alone=not has("blk.0.attn_norm.weight"))
