"""Which GGUFs continue no text, and why. Part of the llama.cpp edge.

llama.cpp would load many of them, and then end the process or write noise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from batching.errors import ModelError
from batching.gguf.reader import GGUFFile

TEXT_MODEL = "choose a chat or text generation model"
# Files that go with a model, by general.type or architecture: what they are, and what to give.
PARTS = {
    "adapter": "a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora",
    "mmproj": "what a model sees or hears with; give the model that it came with",
    "clip": "what a model sees or hears with; give the model that it came with",
    "imatrix": "an importance matrix for quantising; give the model that it was made of",
    "controlvector": "a control vector; give the model that it was made of",
}
# Architectures whose graphs llama.cpp 0.3.36 builds wrong. It ends the process over rows without
# output (chameleon) and over flash attention (plm), and for the rows that have output it gives the
# logits of the batch's first ones (cogvlm).
WRONG = ("chameleon", "cogvlm", "plm")

EMBED = ("llama-embed",)  # architectures without logits of which the metadata do not tell


def part_of_model(path: Path) -> str | None:
    """What a file is that llama.cpp could not load, and what to give instead, if it is no model."""
    try:
        file = GGUFFile(path)
    except ModelError:
        return None  # what is wrong with it llama.cpp has said
    for key in ("general.type", "general.architecture"):
        if file.metadata.get(key) in PARTS:
            return PARTS[file.metadata[key]]
    if not file.tensors and file.metadata.get("split.count", 1) < 2:
        return f"a vocabulary without weights; {TEXT_MODEL}"
    return None


def why_no_text(handle: Any, metadata: Callable[[str], str | None]) -> str | None:
    """Why a loaded ``llama_model *`` does not go on with a text token by token, if it does not."""
    architecture = metadata("general.architecture")
    if architecture in WRONG:
        return f"({architecture}) is of an architecture that llama.cpp computes wrong"
    if not C.llama_model_has_decoder(handle):
        return "is an encoder without a decoder and cannot generate text"
    if C.llama_model_has_encoder(handle):
        return (
            f"({architecture}) has an encoder, as translators and drafting heads have it, and "
            f"does not go on with a text by itself"
        )
    if C.llama_model_is_diffusion(handle):
        return f"({architecture}) writes by diffusion, all of a text at once, not token by token"
    if architecture in EMBED or metadata(f"{architecture}.attention.causal") == "false":
        return f"({architecture}) is an embedding model: it reads a text as a whole"
    return None
