"""What depends on one version of llama.cpp: undeclared functions, and lists kept by hand.

The functions are exported but not in the public header, and are found by the names that C++
compilers give them. A build may lack them; then what needs them raises UnsupportedModel, and
everything else works. The lists were read from the source of CHECKED_WITH: compare them with the
source of a newer version before you raise it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import llama_cpp.llama_cpp as C

from batching.errors import UnsupportedModel
from batching.gguf.mtp import MtpGraphs
from batching.gguf.unsupported import Limits
from batching.llama.library import exported

# The version of llama-cpp-python that everything in this file was checked with.
CHECKED_WITH = "0.3.36"

# What llama.cpp asserts of a file: LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS, the names of
# llama_rope_scaling_type, and the architectures whose one expert it takes for none
# (llama-model.cpp).
LIMITS = Limits(
    n_layers=512,
    n_experts=1024,
    rope_scaling=("none", "linear", "yarn", "longrope"),
    dense=("hunyuan-dense", "hunyuan_vl"),
)

# Architectures whose graphs llama.cpp builds wrong. It ends the process over rows without output
# (chameleon) and over flash attention (plm), and for the rows that have output it gives the logits
# of the batch's first ones (cogvlm).
WRONG = ("chameleon", "cogvlm", "plm")
# Architectures without logits of which the metadata do not tell.
EMBED = ("llama-embed",)

# Architectures that draft for another model, and run beside it; rows of the first two hold a token
# and an embedding.
TAKE_BOTH = ("eagle3", "gemma4-assistant")
HEADS = (*TAKE_BOTH, "dflash")

# Architectures for whose layers for multi-token prediction llama.cpp has a graph, and those of them
# that may have several: over two of another's it would end the process. MiMo-V2-Flash has three
# matrices where its graph wants one.
MTP_GRAPHS = MtpGraphs(
    architectures=(
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
    ),
    several=("hy_v3", "mimo2", "step35"),
    needed={"mimo2": "attn_qkv.weight"},
)
# Architectures that hand out the state that such layers begin with: gemma4's are another file.
GIVE_MTP_STATE = (*MTP_GRAPHS.architectures, "gemma4")

# Architectures whose graphs hand out the inputs of their layers. Asked for them, others end the
# process, so what is not known to do it is refused. (qwen4exp's are wider than it would read.)
TAPPED = (
    "bailingmoe3",
    "deepseek4",
    "gemma4",
    "gpt-oss",
    "hunyuan-dense",
    "hunyuan_vl",
    "lfm2",
    "lfm2moe",
    "llama",
    "mimo2",
    "minimax-01",
    "minimax-m2",
    "muse-glimmer",
    "nanbeige",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
)

_CONTEXT = C.llama_context_p_ctypes
_FLOATS = ctypes.POINTER(ctypes.c_float)
# Arguments, what is returned, and the names of g++ and clang, and of MSVC.
_FUNCTIONS: dict[str, tuple[list[Any], Any, str, str]] = {
    "llama_set_embeddings_layer_inp": (
        [_CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
    ),
    "llama_get_embeddings_layer_inp": (
        [_CONTEXT, ctypes.c_uint32],
        _FLOATS,
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
    ),
    "llama_set_embeddings_nextn": (
        [_CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    "llama_get_embeddings_nextn": (
        [_CONTEXT],
        _FLOATS,
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
    ),
}


@cache
def internal(name: str) -> Callable[..., Any]:
    """One of the functions. Raises UnsupportedModel where this build does not export it."""
    arguments, returned, *mangled = _FUNCTIONS[name]
    function = exported(name, *mangled)
    if function is None:
        raise UnsupportedModel(
            f"this build of llama.cpp does not export {name}, which heads over its layers need; "
            f"install another version of llama-cpp-python, or use heads of another method"
        )
    function.argtypes, function.restype = arguments, returned
    return function  # type: ignore[no-any-return]


class TappedModel(Protocol):
    """What ``check_taps`` asks of a model."""

    @property
    def path(self) -> Path: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def gives_mtp_state(self) -> bool: ...
    def metadata(self, key: str) -> str | None: ...


def check_taps(model: TappedModel, layers: Sequence[int]) -> None:
    """Raise UnsupportedModel where the inputs of these layers cannot be had."""
    if model.gives_mtp_state and model.n_layer in layers:
        internal("llama_set_embeddings_nextn")
        layers = [layer for layer in layers if layer != model.n_layer]
    if not layers:
        return
    architecture = model.metadata("general.architecture")
    if architecture not in TAPPED:
        raise UnsupportedModel(
            f"{model.path} is of the architecture {architecture}, of which llama.cpp does not give "
            f"out the inputs of layers; it does for {', '.join(TAPPED)}"
        )
    for layer in layers:
        if not 0 <= layer < model.n_layer:
            raise UnsupportedModel(
                f"the input of layer {layer} is wanted, and {model.path} has {model.n_layer} "
                f"layers, counted from 0; take the heads that were made for it"
            )
    internal("llama_set_embeddings_layer_inp")
    internal("llama_get_embeddings_layer_inp")
