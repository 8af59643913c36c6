"""Detects loaded models that do not generate text token by token.

llama.cpp would run many of them and then abort or produce noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C

from batching.llama.private_api import BROKEN_GRAPHS, EMBEDDING_MODELS

if TYPE_CHECKING:
    from batching.llama.model import Model


def not_a_text_model(model: Model) -> str | None:
    """Why a loaded model does not generate text token by token; None if it does."""
    native, architecture = model.native, model.architecture
    if architecture in BROKEN_GRAPHS:
        return f"({architecture}) has an architecture that llama.cpp computes incorrectly"
    if not C.llama_model_has_decoder(native.handle):
        return "is an encoder without a decoder and cannot generate text"
    if C.llama_model_has_encoder(native.handle):
        return (
            f"({architecture}) has an encoder, like translation models and drafting heads, and "
            f"does not generate text by itself"
        )
    if C.llama_model_is_diffusion(native.handle):
        return f"({architecture}) generates text by diffusion, not token by token"
    is_causal = model.metadata(f"{architecture}.attention.causal") != "false"
    if architecture in EMBEDDING_MODELS or not is_causal:
        return f"({architecture}) is an embedding model and does not generate text"
    return None
