"""Detects loaded models that do not continue text token by token.

llama.cpp would run many of them, and then abort the process or write noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C

from batching.llama.private_api import EMBED, WRONG


def why_no_text(handle: Any, metadata: Callable[[str], str | None]) -> str | None:
    """Why a loaded ``llama_model *`` does not continue a text token by token, if it does not."""
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
