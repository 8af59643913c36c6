"""Finds a GGUF's layers for multi-token prediction (MTP; llama.cpp says nextn).

llama.cpp says how many its metadata speak of. Some converters leave the layers out and say so
nevertheless, some files hold nothing else, and over either it would end the process later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names

EVERY = "nextn.eh_proj.weight"  # what all such layers have


class MtpGraphs(NamedTuple):
    """For which layers llama.cpp has a compute graph.

    architectures  of the models
    several        those of them that may have more than one such layer
    needed         a tensor of the layer, by architecture, without which the process would end
    """

    architectures: tuple[str, ...]
    several: tuple[str, ...]
    needed: Mapping[str, str]


class MtpLayers(NamedTuple):
    """n_layers of them are there and can be run; ``alone`` says that the layers of the model itself
    are not there."""

    n_layers: int
    alone: bool


def find_mtp_layers(path: Path, graphs: MtpGraphs) -> MtpLayers:
    """Those in the file, or in the files that it is one of.

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF or UnsupportedModel.
    """
    files = [GGUFFile(path.with_name(name)) for name in part_names(path.name)]
    architecture = str(files[0].metadata.get("general.architecture"))
    n_layers = files[0].number(f"{architecture}.nextn_predict_layers")
    first = files[0].number(f"{architecture}.block_count") - n_layers

    def has(name: str) -> bool:
        return any(name in file.tensors for file in files)

    if not has(f"blk.{first}.{EVERY}"):
        return MtpLayers(0, alone=False)
    can_run = (
        architecture in graphs.architectures
        and (n_layers == 1 or architecture in graphs.several)
        and has(f"blk.{first}.{graphs.needed.get(architecture, EVERY)}")
    )
    return MtpLayers(n_layers if can_run else 0, alone=not has("blk.0.attn_norm.weight"))
