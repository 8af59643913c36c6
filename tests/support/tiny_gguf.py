"""Random GGUFs made in tests: small enough to load in milliseconds, real enough to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, LlamaFileType, TokenType

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


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    n_ctx: int = 512,
    n_embd: int = 32,
    n_layer: int = 2,
    n_head: int = 4,
    architecture: str = "llama",
    chat_template: str | None = CHAT_TEMPLATE,
    bos: int = 1,
    add_bos: bool = True,
    tensors_per_file: int = 0,
    n_bytes: int = 256,
    tokenizer: str = "llama",
    more: Callable[[GGUFWriter], object] | None = None,
    last: Callable[[GGUFWriter], object] | None = None,
    influence: float = 1.0,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Path:
    """Write an F32 model of random weights and return its path; with ``tensors_per_file`` the path
    from which the names of the files, ``name-00001-of-00003.gguf``, are made. ``more`` adds
    metadata, ``last`` may change any. Layers add ``influence`` of what random weights would;
    ``tensors`` replace random ones."""
    rng = np.random.default_rng(seed)
    n_vocab = len(vocabulary(n_bytes=n_bytes)[0])
    writer = started_writer(
        path,
        architecture,
        n_ctx,
        n_embd,
        n_layer,
        chat_template,
        tensors_per_file,
        n_bytes,
        tokenizer,
    )
    if more is not None:
        more(writer)
    writer.add_bos_token_id(bos)
    writer.add_add_bos_token(add_bos)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(n_embd // n_head)

    def add(name: str, *shape: int, scale: float = 0.0) -> None:
        scale = scale or 1.6 / np.sqrt(shape[-1])
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            scale *= influence
        random = (scale * rng.standard_normal(shape)).astype(np.float32)
        writer.add_tensor(name, (tensors or {}).get(name, random))

    def add_norm(name: str) -> None:
        writer.add_tensor(name, (tensors or {}).get(name, np.ones(n_embd, np.float32)))

    add("token_embd.weight", n_vocab, n_embd, scale=1.0)
    for i in range(n_layer):
        add_norm(f"blk.{i}.attn_norm.weight")
        add_norm(f"blk.{i}.ffn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}.weight", n_embd, n_embd)
        add(f"blk.{i}.ffn_gate.weight", 2 * n_embd, n_embd)
        add(f"blk.{i}.ffn_up.weight", 2 * n_embd, n_embd)
        add(f"blk.{i}.ffn_down.weight", n_embd, 2 * n_embd)
    add_norm("output_norm.weight")
    add("output.weight", n_vocab, n_embd)
    if last is not None:
        last(writer)
    return finish_writer(writer, path)


def write_recurrent_gguf(path: Path, *, n_embd: int = 32, n_layer: int = 1) -> Path:
    """Write a Mamba model of random weights: its state cannot drop part of a sequence."""
    rng = np.random.default_rng(0)
    d_inner, d_conv, d_state, dt_rank = 2 * n_embd, 4, 8, 4
    writer = started_writer(path, "mamba", 512, n_embd, n_layer, None)
    writer.add_bos_token_id(1)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(d_conv)
    writer.add_ssm_inner_size(d_inner)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(dt_rank)

    def add(name: str, *shape: int) -> None:
        values = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        # Positive ones would let the state grow without end.
        writer.add_tensor(name, -abs(values) if name.endswith("ssm_a") else values)

    add("token_embd.weight", len(vocabulary()[0]), n_embd)
    add("output_norm.weight", n_embd)
    for i in range(n_layer):
        add(f"blk.{i}.attn_norm.weight", n_embd)
        add(f"blk.{i}.ssm_in.weight", 2 * d_inner, n_embd)
        add(f"blk.{i}.ssm_conv1d.weight", d_inner, d_conv)
        add(f"blk.{i}.ssm_conv1d.bias", d_inner)
        add(f"blk.{i}.ssm_x.weight", dt_rank + 2 * d_state, d_inner)
        add(f"blk.{i}.ssm_dt.weight", d_inner, dt_rank)
        add(f"blk.{i}.ssm_dt.bias", d_inner)
        add(f"blk.{i}.ssm_a", d_inner, d_state)
        add(f"blk.{i}.ssm_d", d_inner)
        add(f"blk.{i}.ssm_out.weight", n_embd, d_inner)
    return finish_writer(writer, path)


def write_hybrid_gguf(
    path: Path,
    *,
    n_embd: int = 32,
    n_layer: int = 3,
    n_head: int = 4,
    influence: float = 1.0,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Write an LFM2 model of random weights, every third layer attention and the others short
    convolutions: its state can be rewound as far as it keeps copies. Layers add ``influence`` of
    what random weights would; ``tensors`` are added or replace random ones."""
    own = dict(tensors or {})
    rng = np.random.default_rng(0)
    head, width = n_embd // n_head, 3
    is_attention = [i % 3 == 2 for i in range(n_layer)]
    writer = started_writer(path, "lfm2", 512, n_embd, n_layer, CHAT_TEMPLATE)
    writer.add_bos_token_id(1)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(n_head)
    writer.add_head_count_kv([n_head if attention else 0 for attention in is_attention])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_shortconv_l_cache(width)

    def add(name: str, *shape: int, scale: float = 0.0) -> None:
        scale = scale or 1.6 / np.sqrt(shape[-1])
        if name.endswith(("attn_output.weight", "ffn_down.weight", "out_proj.weight")):
            scale *= influence
        random = (scale * rng.standard_normal(shape)).astype(np.float32)
        writer.add_tensor(name, own.pop(name, random))

    def add_norm(name: str, n: int = n_embd) -> None:
        writer.add_tensor(name, np.ones(n, np.float32))

    add("token_embd.weight", len(vocabulary()[0]), n_embd, scale=1.0)
    add_norm("token_embd_norm.weight")
    for i in range(n_layer):
        add_norm(f"blk.{i}.attn_norm.weight")
        add_norm(f"blk.{i}.ffn_norm.weight")
        add(f"blk.{i}.ffn_gate.weight", 2 * n_embd, n_embd)
        add(f"blk.{i}.ffn_up.weight", 2 * n_embd, n_embd)
        add(f"blk.{i}.ffn_down.weight", n_embd, 2 * n_embd)
        if is_attention[i]:
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                add(f"blk.{i}.{name}.weight", n_embd, n_embd)
            add_norm(f"blk.{i}.attn_q_norm.weight", head)
            add_norm(f"blk.{i}.attn_k_norm.weight", head)
        else:
            add(f"blk.{i}.shortconv.conv.weight", n_embd, width)
            add(f"blk.{i}.shortconv.in_proj.weight", 3 * n_embd, n_embd)
            add(f"blk.{i}.shortconv.out_proj.weight", n_embd, n_embd)
    for name, values in own.items():
        writer.add_tensor(name, values)
    return finish_writer(writer, path)


def write_learned_positions_gguf(path: Path, *, n_ctx: int, n_embd: int = 32) -> Path:
    """Write a GPT-2 model of random weights, which has learned ``n_ctx`` positions."""
    rng = np.random.default_rng(0)
    writer = started_writer(path, "gpt2", n_ctx, n_embd, 1, None)
    writer.add_bos_token_id(1)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)

    def add(name: str, n_out: int, n_in: int) -> None:
        weights = 1.6 / np.sqrt(n_in) * rng.standard_normal((n_out, n_in))
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))

    def add_with_bias(name: str, n_out: int, n_in: int = 0) -> None:
        if n_in:
            add(name, n_out, n_in)
        else:
            writer.add_tensor(f"{name}.weight", np.ones(n_out, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(n_out, np.float32))

    add("token_embd", len(vocabulary()[0]), n_embd)
    add("position_embd", n_ctx, n_embd)
    add_with_bias("output_norm", n_embd)
    add_with_bias("blk.0.attn_norm", n_embd)
    add_with_bias("blk.0.attn_qkv", 3 * n_embd, n_embd)
    add_with_bias("blk.0.attn_output", n_embd, n_embd)
    add_with_bias("blk.0.ffn_norm", n_embd)
    add_with_bias("blk.0.ffn_up", 2 * n_embd, n_embd)
    add_with_bias("blk.0.ffn_down", n_embd, 2 * n_embd)
    return finish_writer(writer, path)


def started_writer(
    path: Path,
    architecture: str,
    n_ctx: int,
    n_embd: int,
    n_layer: int,
    chat_template: str | None,
    tensors_per_file: int = 0,
    n_bytes: int = 256,
    tokenizer: str = "llama",
) -> GGUFWriter:
    tokens, scores, types = vocabulary(n_bytes=n_bytes)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    writer.add_name("tiny")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(tokens.index("<|end|>"))
    writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    return writer


def finish_writer(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
