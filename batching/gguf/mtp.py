"""Finds multi-token-prediction layers in a GGUF (MTP; llama.cpp calls them nextn).

llama.cpp trusts the layer count in the metadata. Some converters drop the layers but keep the
count, and some files contain only these layers; llama.cpp would abort on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names

MTP_TENSOR = "nextn.eh_proj.weight"  # present in every MTP layer


class MtpGraphs(NamedTuple):
    """The MTP layers llama.cpp has a compute graph for.

    architectures  model architectures
    several        those that may have more than one MTP layer
    needed         a tensor each architecture's graph requires; llama.cpp aborts without it
    """

    architectures: Sequence[str]
    several: Sequence[str]
    needed: Mapping[str, str]


class MtpLayers(NamedTuple):
    """MTP layers found in a file.

    n_layers  layers that llama.cpp can run
    mtp_only  the file lacks the model's own layers
    """

    n_layers: int
    mtp_only: bool


def find_mtp_layers(path: Path, graphs: MtpGraphs) -> MtpLayers:
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
        architecture in graphs.architectures
        and (n_layers == 1 or architecture in graphs.several)
        and has(f"blk.{first}.{graphs.needed.get(architecture, MTP_TENSOR)}")
    )
    return MtpLayers(n_layers if can_run else 0, mtp_only=not has("blk.0.attn_norm.weight"))
