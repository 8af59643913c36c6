"""What depends on the llama.cpp version: private functions and hand-kept lists.

The functions are exported but not in the public header, so they are looked up by their mangled C++
names, once, when the library is loaded. If a build lacks one, only the features that need it raise
UnsupportedModel. The lists here and in ``batching.gguf`` (``unsupported`` and ``mtp``) come from
the source of CHECKED_WITH; compare them with a newer version's source before raising it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as C

from batching.errors import UnsupportedModel
from batching.gguf.mtp import MTP_ARCHITECTURES
from batching.llama.library import exported

# The llama-cpp-python version this file was checked against.
CHECKED_WITH = "0.3.36"

# Architectures with a faulty graph in llama.cpp. It aborts on rows without output (chameleon) and
# on flash attention (plm), and returns the logits of the batch's first rows for those with output
# (cogvlm).
BROKEN_GRAPHS = ("chameleon", "cogvlm", "plm")
# Embedding architectures whose metadata do not say so.
EMBEDDING_MODELS = ("llama-embed",)

# Architectures of drafting heads that run beside their target. A row of the first two has both a
# token and an embedding.
DUAL_INPUT_HEADS = ("eagle3", "gemma4-assistant")
HEAD_ARCHITECTURES = (*DUAL_INPUT_HEADS, "dflash")

# Architectures that expose the state MTP layers start from. Gemma 4's layers are a separate file.
EXPOSES_MTP_STATE = (*MTP_ARCHITECTURES, "gemma4")

# Architectures whose graphs expose layer inputs. Requesting them aborts others, so unlisted ones
# are rejected. (qwen4exp is not listed: its inputs are wider than llama.cpp would copy.)
EXPOSES_LAYER_INPUTS = (
    "bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan-dense hunyuan_vl lfm2 lfm2moe llama mimo2 "
    "minimax-01 minimax-m2 muse-glimmer nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 "
    "qwen35moe qwen3moe qwen3next"
).split()

_FOR_VECTORS = "for vectors, load it beside a text model, as {embedding_model}"


def is_covered(installed: str) -> bool:
    """Whether this file holds for a version: patch releases change nothing of it."""
    return installed.split(".")[:2] == CHECKED_WITH.split(".")[:2]


def _look_up(name: str, gnu: str, msvc: str, result: Any, *arguments: Any) -> Any:
    """A function of a context by its name in C, of g++ and clang, or of MSVC; None if it is not
    exported. The compilers add their letters for its other arguments, and MSVC for its result.
    """
    returned = "X" if result is None else "PEAM"
    function = exported(
        name,
        f"_Z{len(name)}{name}P13llama_context{gnu}",
        f"?{name}@@YA{returned}PEAUllama_context@@{msvc}@Z",
    )
    if function is not None:
        function.restype, function.argtypes = result, [C.llama_context_p_ctypes, *arguments]
    return function


_BOOL, _INT, _FLOATS = ctypes.c_bool, ctypes.c_uint32, ctypes.c_void_p  # the address of floats
FUNCTIONS: dict[str, Any] = {
    name: _look_up(name, *signature)
    for name, *signature in (
        ("llama_set_embeddings_layer_inp", "jb", "I_N", None, _INT, _BOOL),
        ("llama_get_embeddings_layer_inp", "j", "I", _FLOATS, _INT),
        ("llama_set_embeddings_nextn", "bb", "_N1", None, _BOOL, _BOOL),
        ("llama_get_embeddings_nextn", "", "", _FLOATS),
    )
}


def internal(name: str) -> Callable[..., Any]:
    """A function of ``FUNCTIONS``. Raises UnsupportedModel if this build does not export it, or may
    take other arguments."""
    installed, function = llama_cpp.__version__, FUNCTIONS[name]
    if function is not None and is_covered(installed):
        found: Callable[..., Any] = function
        return found
    problem = f"may have changed {name}" if function is not None else f"does not export {name}"
    raise UnsupportedModel(
        f"llama-cpp-python {installed} {problem}, so heads that read the model's layers (eagle3, "
        f"dflash, mtp) cannot draft; install version {CHECKED_WITH}, or use another method"
    )


def check_functions() -> None:
    """Raise UnsupportedModel unless this build has all of ``FUNCTIONS``."""
    for name in FUNCTIONS:
        internal(name)


def not_a_text_model(handle: Any, architecture: str | None, *, causal: bool) -> str | None:
    """Why a loaded model does not generate text token by token; None if it does.

    llama.cpp would run many of these and then abort or produce noise.
    """
    if architecture in BROKEN_GRAPHS:
        return f"({architecture}) has an architecture that llama.cpp computes incorrectly"
    if not C.llama_model_has_decoder(handle):
        return f"is an encoder without a decoder and cannot generate text; {_FOR_VECTORS}"
    if C.llama_model_has_encoder(handle):
        return (
            f"({architecture}) has an encoder, like translation models and drafting heads, and "
            f"does not generate text by itself"
        )
    if C.llama_model_is_diffusion(handle):
        return f"({architecture}) generates text by diffusion, not token by token"
    if architecture in EMBEDDING_MODELS or not causal:
        return f"({architecture}) is an embedding model and does not generate text; {_FOR_VECTORS}"
    return None
