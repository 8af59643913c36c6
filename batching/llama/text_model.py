"""Detects loaded models that do not generate text token by token.

llama.cpp would run many of them and then abort or produce noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C

from batching.llama.private_api import BROKEN_GRAPHS, EMBEDDING_MODELS


def not_a_text_model(handle: Any, metadata: Callable[[str], str | None]) -> str | None:
    """Why a loaded ``llama_model *`` does not generate text token by token; None if it does."""
    architecture = metadata("general.architecture")
    if architecture in BROKEN_GRAPHS:
        return f"({architecture}) has an architecture that llama.cpp computes incorrectly"
    if not C.llama_model_has_decoder(handle):
        return "is an encoder without a decoder and cannot generate text"
    if C.llama_model_has_encoder(handle):
        return (
            f"({architecture}) has an encoder, like translation models and drafting heads, and "
            f"does not generate text by itself"
        )
    if C.llama_model_is_diffusion(handle):
        return f"({architecture}) generates text by diffusion, not token by token"
    if architecture in EMBEDDING_MODELS or metadata(f"{architecture}.attention.causal") == "false":
        return f"({architecture}) is an embedding model and does not generate text"
    return None
