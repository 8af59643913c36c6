"""Finds multi-token-prediction layers in a GGUF (MTP; llama.cpp calls them nextn).

llama.cpp trusts the layer count in the metadata. Some converters drop the layers but keep the
count, and some files contain only these layers; llama.cpp would abort on both.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names

MTP_TENSOR = "nextn.eh_proj.weight"  # present in every MTP layer


# Architectures whose multi-token-prediction layers llama.cpp has a graph for
# (``private_api.CHECKED_WITH``). It aborts on more than one such layer except in ``_SEVERAL``, and
# without a tensor that a graph needs: MiMo-V2-Flash has three matrices where it expects one.
MTP_ARCHITECTURES = (
    "bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 glm-dsa glm4moe hy_v3 mimo2 "
    "nemotron_h_moe qwen35 qwen35moe qwen3next step35"
).split()
_SEVERAL = ("hy_v3", "mimo2", "step35")
_NEEDED = {"mimo2": "attn_qkv.weight"}


class MtpLayers(NamedTuple):
    """MTP layers found in a file.

    n_layers  layers that llama.cpp can run
    mtp_only  the file lacks the model's own layers
    """

    n_layers: int
    mtp_only: bool


def find_mtp_layers(path: Path) -> MtpLayers:
    """Find the MTP layers of the model at ``path``; for a split model, in all its files.

    Raises ModelError, and UnsupportedModel for another format version.
    """
    files = [GGUFFile(path.with_name(name)) for name in part_names(path.name)]
    architecture = str(files[0].metadata.get("general.architecture"))
    n_layers = files[0].number(f"{architecture}.nextn_predict_layers")
    first = files[0].number(f"{architecture}.block_count") - n_layers

    def has(name: str) -> bool:
        return any(name in file.tensors for file in files)

    if not has(f"blk.{first}.{MTP_TENSOR}"):
        return MtpLayers(0, mtp_only=False)
    can_run = (
        architecture in MTP_ARCHITECTURES
        and (n_layers == 1 or architecture in _SEVERAL)
        and has(f"blk.{first}.{_NEEDED.get(architecture, MTP_TENSOR)}")
    )
    return MtpLayers(n_layers if can_run else 0, mtp_only=not has("blk.0.attn_norm.weight"))
