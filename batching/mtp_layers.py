"""What a GGUF has of layers for multi-token prediction (MTP; llama.cpp says nextn).

llama.cpp says how many its metadata speak of. Some converters leave the layers out and say so
nevertheless, some files hold nothing else, and over either it would end the process later.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from batching.gguf_file import GGUFFile
from batching.parts import part_names

# Architectures for whose layers llama.cpp has a graph.
ARCHITECTURES = (
    "bailingmoe3",
    "cohere2moe",
    "deepseek2",
    "deepseek32",
    "deepseek4",
    "glm-dsa",
    "glm4moe",
    "glm5-next",
    "hy_v3",
    "mimo2",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "step35",
)


class MtpLayers(NamedTuple):
    """n_layers of them are there; ``alone`` says that the layers of the model itself are not."""

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

    if architecture not in ARCHITECTURES or not has(f"blk.{first}.nextn.eh_proj.weight"):
        return MtpLayers(0, alone=False)
    return MtpLayers(n_layers, alone=not has("blk.0.attn_norm.weight"))
