"""Random GGUFs made in tests: small enough to load in milliseconds, real enough to decode.

``write_model`` writes a file from two tables: its keys and its tensors. The others are tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, TokenType
from gguf.constants import PoolingType

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
WORDS = ("▁", "▁the", "▁a", "▁cat", "▁dog", "▁saw", "▁and", "th", "he", "in", "er", "an")


def vocabulary(*, n_bytes: int = 256) -> tuple[list[str], list[float], list[TokenType]]:
    """SPM: unknown, BOS, EOS, 256 bytes, control tokens, letters, some words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(n_bytes)), *CONTROL]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * n_bytes + [TokenType.CONTROL] * len(CONTROL)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*WORDS, *letters, "é", ",", ".", "!"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
    return tokens + pieces, scores, types + [TokenType.NORMAL] * len(pieces)


N_TINY = len(vocabulary()[0])
Array = npt.NDArray[Any]
# Its values; a function that draws them; or its shape: a matrix is normal, a bias 0, a norm 1.
Tensor = Array | Callable[[np.random.Generator], Array] | tuple[int, ...]
Tensors = Mapping[str, Tensor]
T = TypeVar("T")
# The matrices by which a layer adds to its input.
ADDING = tuple(f"{of}.weight" for of in "attn_output ffn_down down_exps out_proj ssm_out".split())
SIZES = (
    *("embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv"),
)


def normal(scale: float, *shape: int) -> Callable[[np.random.Generator], Array]:
    """Draws normal values of deviation ``scale`` / √ columns."""
    return lambda rng: scale / np.sqrt(shape[-1]) * rng.standard_normal(shape)


def write_model(
    path: Path,
    architecture: str,
    sizes: Sequence[int | list[int] | None],
    keys: Mapping[str, object],
    tensors: Tensors,
    *,
    own: Mapping[str, Array | None] | None = None,
    seed: int = 0,
    influence: float = 1.0,
    n_ctx: int = 512,
    bos: int | None = 1,
    chat_template: str | None = None,
    tensors_per_file: int = 0,
    n_bytes: int = 256,
    tokenizer: str = "llama",
    more: Callable[[GGUFWriter], object] | None = None,
    last: Callable[[GGUFWriter], object] | None = None,
) -> Path:
    """Write an F32 model and return its path; with ``tensors_per_file`` the path from which the
    names of the files, ``name-00001-of-00003.gguf``, are made.

    ``sizes`` are of SIZES, ``keys`` those of the architecture if they begin with a dot. ``own``
    tensors are added or replace others; None leaves out a key or a tensor. Layers add ``influence``
    of what random weights would. ``more`` adds keys, ``last`` may change anything.
    """
    tokens, scores, types = vocabulary(n_bytes=n_bytes)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    every: dict[str, object] = {
        "general.name": "tiny",
        "general.file_type": int(LlamaFileType.ALL_F32),
        ".context_length": n_ctx,
        **{f".{name}": size for name, size in zip(SIZES, sizes, strict=False)},
        ".vocab_size": len(tokens),
        "tokenizer.ggml.model": tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": chat_template,
        **keys,
    }
    if len(sizes) > 2 and architecture != "gpt2":
        every[".attention.layer_norm_rms_epsilon"] = 1e-5
    for key, value in every.items():
        if value is not None:
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind
            writer.add_key_value(architecture + key if key[0] == "." else key, value, kind)
    if more is not None:
        more(writer)
    rng, made = np.random.default_rng(seed), {}
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple) and len(tensor) == 1:
            tensor = np.zeros(tensor) if name.endswith(".bias") else np.ones(tensor)
        elif isinstance(tensor, tuple):
            tensor = normal(1.6 * influence if name.endswith(ADDING) else 1.6, *tensor)
        made[name] = (tensor(rng) if callable(tensor) else tensor).astype(np.float32)
    for name, values in {**made, **(own or {})}.items():
        if values is not None:
            i64 = GGMLQuantizationType.I64 if values.dtype == np.int64 else None
            writer.add_tensor(name, values, raw_dtype=i64)
    if last is not None:
        last(writer)
    return finish_writer(writer, path)


def finish_writer(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Parts of tables


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Tensors by name: ``attn_q 64 32, ssm_dt.bias 4``. Weights, unless the name has a dot."""
    found = {}
    for name, *sizes in map(str.split, text.split(",")):
        full = name.strip(".") if "." in name else f"{name}.weight"
        found[full] = tuple(map(int, sizes))
    return found


def biased(text: str) -> dict[str, tuple[int, ...]]:
    """As ``shapes``, each with its bias."""
    both = ({name: n, name.replace("weight", "bias"): n[:1]} for name, n in shapes(text).items())
    return {name: n for pair in both for name, n in pair.items()}


def counts(text: str) -> dict[str, object]:
    """Keys of the architecture: ``expert_count 4, expert_used_count 2``."""
    return {f".{name}": int(n) for name, n in map(str.split, text.split(","))}


def norms(n: int, *names: str) -> dict[str, Tensor]:
    return {f"{name}.weight": (n,) for name in names}


def attention(n_embd: int) -> dict[str, Tensor]:
    return {f"attn_{name}.weight": (n_embd, n_embd) for name in ("q", "k", "v", "output")}


def ffn(
    n_embd: int, part: str = "", n: tuple[int, ...] = (), down: float | None = None
) -> dict[str, Tensor]:
    """The feed-forward block of a layer, or of ``n`` experts; ``down`` scales what it adds."""
    last = (*n, n_embd, 2 * n_embd)
    return {
        f"ffn_gate{part}.weight": (*n, 2 * n_embd, n_embd),
        f"ffn_up{part}.weight": (*n, 2 * n_embd, n_embd),
        f"ffn_down{part}.weight": last if down is None else normal(down, *last),
    }


def layers(*tables: Mapping[str, T], first: int = 0) -> dict[str, T]:
    """The tables of successive layers, under their names in the file."""
    blocks = enumerate(tables, first)
    return {f"blk.{i}.{name}": tensor for i, of in blocks for name, tensor in of.items()}


# Models


def write_tiny_gguf(
    path: Path,
    *,
    n_embd: int = 32,
    n_layer: int = 2,
    n_head: int = 4,
    n_expert: int = 0,
    architecture: str = "llama",
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = True,
    tensors: Mapping[str, Array] | None = None,
    **more: Any,
) -> Path:
    """Write a Llama model; ``more`` as in ``write_model``. With ``n_expert``, each token uses two
    of so many experts."""
    keys = counts(f"rope.dimension_count {n_embd // n_head}")
    keys["tokenizer.ggml.add_bos_token"] = add_bos
    feed: dict[str, Tensor] = ffn(n_embd)
    if n_expert:
        keys |= counts(f"expert_count {n_expert}, expert_used_count 2")
        feed = {"ffn_gate_inp.weight": (n_expert, n_embd), **ffn(n_embd, "_exps", (n_expert,))}
    n_vocab = len(vocabulary(n_bytes=more.get("n_bytes", 256))[0])
    layer = {**norms(n_embd, "attn_norm", "ffn_norm"), **attention(n_embd), **feed}
    table = {
        "token_embd.weight": normal(np.sqrt(n_embd), n_vocab, n_embd),
        **layers(*[layer] * n_layer),
        **norms(n_embd, "output_norm"),
        "output.weight": (n_vocab, n_embd),
    }
    sizes = (n_embd, n_layer, 2 * n_embd, n_head, n_head)
    more |= {"own": tensors, "chat_template": chat_template}
    return write_model(path, architecture, sizes, keys, table, **more)


def write_recurrent_gguf(path: Path) -> Path:
    """Write a Mamba model: its state cannot drop part of a sequence."""
    keys = "ssm.conv_kernel 4, ssm.inner_size 64, ssm.state_size 8, ssm.time_step_rank 4"
    layer = shapes(
        "attn_norm 32, ssm_in 128 32, ssm_conv1d 64 4, ssm_conv1d.bias 64, ssm_x 20 64, "
        "ssm_dt 64 4, ssm_dt.bias 64, ssm_a. 64 8, ssm_d. 64, ssm_out 32 64"
    )
    table = shapes(f"token_embd {N_TINY} 32, output_norm 32") | layers(layer)

    def drawn(name: str, rng: np.random.Generator) -> Array:
        values = 0.3 * rng.standard_normal(table[name])
        return -abs(values) if name.endswith("ssm_a") else values  # or the state grows without end

    values = {name: partial(drawn, name) for name in table}
    return write_model(path, "mamba", (32, 1, 0, 0), counts(keys), values)


def write_window_gguf(path: Path, *, n_window: int = 512, n_ctx: int = 512) -> Path:
    """Write a Gemma 3 model, every other layer of which attends to ``n_window`` tokens."""
    keys = (
        f"attention.sliding_window {n_window}, attention.sliding_window_pattern 2, "
        "attention.key_length 8, attention.value_length 8"
    )
    layer = {
        **norms(32, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        **norms(8, "attn_q_norm", "attn_k_norm"),
        **attention(32),
        **ffn(32),
    }
    table: Tensors = {
        "token_embd.weight": (N_TINY, 32),
        "output_norm.weight": (32,),
        **layers(layer, layer),
    }
    return write_model(path, "gemma3", (32, 2, 64, 4, 4), counts(keys), table, n_ctx=n_ctx)


def write_hybrid_gguf(
    path: Path, *, n_layer: int = 3, tensors: Mapping[str, Array] | None = None, **more: Any
) -> Path:
    """Write an LFM2 model, every third layer attention and the others short convolutions: its state
    can be rewound as far as it keeps copies. ``more`` as in ``write_model``."""
    common = {**norms(32, "attn_norm", "ffn_norm"), **ffn(32)}
    attending = {**common, **attention(32), **norms(8, "attn_q_norm", "attn_k_norm")}
    folding = "shortconv.conv.weight 32 3, shortconv.in_proj.weight 96 32"
    folding += ", shortconv.out_proj.weight 32 32"
    table: Tensors = {
        "token_embd.weight": normal(np.sqrt(32), N_TINY, 32),
        "token_embd_norm.weight": (32,),
        **layers(*[attending if i % 3 == 2 else common | shapes(folding) for i in range(n_layer)]),
    }
    n_kv = [4 if i % 3 == 2 else 0 for i in range(n_layer)]
    more |= {"own": tensors, "chat_template": CHAT_TEMPLATE}
    sizes = (32, n_layer, 64, 4, n_kv)
    return write_model(path, "lfm2", sizes, {".shortconv.l_cache": 3}, table, **more)


def write_learned_positions_gguf(path: Path, *, n_ctx: int) -> Path:
    """Write a GPT-2 model, which has learned ``n_ctx`` positions."""
    layer = biased(
        "attn_norm 32, attn_qkv 96 32, attn_output 32 32, ffn_norm 32, ffn_up 64 32, ffn_down 32 64"
    )
    outer = shapes(f"token_embd {N_TINY} 32, position_embd {n_ctx} 32")
    table = outer | biased("output_norm 32") | layers(layer)
    keys = {".attention.layer_norm_epsilon": 1e-5}
    return write_model(path, "gpt2", (32, 1, 64, 4), keys, table, n_ctx=n_ctx)


def write_bert_gguf(path: Path, pooling: PoolingType) -> Path:
    """Write a BERT model with one layer: an embedding model without a cache."""
    keys = {
        ".attention.layer_norm_epsilon": 1e-5,
        ".attention.causal": False,
        ".pooling_type": int(pooling),
        "tokenizer.ggml.token_type_count": 1,
    }
    layer = biased(
        "attn_q 32 32, attn_k 32 32, attn_v 32 32, attn_output 32 32, attn_output_norm 32, "
        "ffn_up 64 32, ffn_down 32 64, layer_output_norm 32"
    )
    outer = shapes(f"token_embd {N_TINY} 32, token_types 1 32, position_embd 128 32")
    table = outer | biased("token_embd_norm 32") | layers(layer)
    return write_model(path, "bert", (32, 1, 64, 4, 4), keys, table, n_ctx=128)
