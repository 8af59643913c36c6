"""Random GGUFs made in tests: small enough to load in milliseconds, real enough to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
TensorsByName = Mapping[str, npt.NDArray[Any]]


class Tensors:
    """Adds random tensors to a file, except where ``own`` has one of the name. ``influence``
    scales the matrices by which a layer adds to its input."""

    def __init__(
        self, writer: GGUFWriter, own: TensorsByName | None = None, influence: float = 1.0
    ) -> None:
        self.own, self.rng = dict(own or {}), np.random.default_rng(0)
        self._writer, self._influence = writer, influence

    def put(self, name: str, values: npt.NDArray[Any]) -> None:
        self._writer.add_tensor(name, self.own.pop(name, values.astype(np.float32)))

    def add(self, name: str, *shape: int, scale: float = 1.6) -> None:
        """Normal weights of deviation ``scale`` / √ columns."""
        outputs = ("attn_output.weight", "ffn_down.weight", "down_exps.weight", "out_proj.weight")
        if name.endswith(outputs):
            scale *= self._influence
        self.put(name, scale / np.sqrt(shape[-1]) * self.rng.standard_normal(shape))

    def add_norms(self, n: int, *names: str, value: float = 1.0) -> None:
        for name in names:
            self.put(f"{name}.weight", np.full(n, value))

    def add_ffn(
        self, blk: str, n_embd: int, part: str = "", n: tuple[int, ...] = (), scale: float = 1.6
    ) -> None:
        for name in ("gate", "up"):
            self.add(f"{blk}.ffn_{name}{part}.weight", *n, 2 * n_embd, n_embd)
        self.add(f"{blk}.ffn_down{part}.weight", *n, n_embd, 2 * n_embd, scale=scale)

    def add_attention(self, blk: str, n_embd: int) -> None:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            self.add(f"{blk}.{name}.weight", n_embd, n_embd)


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    n_ctx: int = 512,
    n_embd: int = 32,
    n_layer: int = 2,
    n_head: int = 4,
    n_expert: int = 0,
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
    tensors: TensorsByName | None = None,
) -> Path:
    """Write an F32 model of random weights and return its path; with ``tensors_per_file`` the path
    from which the names of the files, ``name-00001-of-00003.gguf``, are made. ``more`` adds
    metadata, ``last`` may change any. Layers add ``influence`` of what random weights would;
    ``tensors`` replace random ones. With ``n_expert``, each token uses two of so many experts."""
    writer = started_writer(
        path, architecture, n_embd, n_layer, (2 * n_embd, n_head, n_head), n_ctx=n_ctx, bos=bos,
        chat_template=chat_template, tensors_per_file=tensors_per_file, n_bytes=n_bytes,
        tokenizer=tokenizer,
    )  # fmt: skip
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(2)
    if more is not None:
        more(writer)
    writer.add_add_bos_token(add_bos)
    writer.add_rope_dimension_count(n_embd // n_head)
    made, n_vocab = Tensors(writer, tensors, influence), len(vocabulary(n_bytes=n_bytes)[0])
    made.rng = np.random.default_rng(seed)
    made.add("token_embd.weight", n_vocab, n_embd, scale=np.sqrt(n_embd))
    for i in range(n_layer):
        made.add_norms(n_embd, f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm")
        made.add_attention(f"blk.{i}", n_embd)
        if n_expert:
            made.add(f"blk.{i}.ffn_gate_inp.weight", n_expert, n_embd)
            made.add_ffn(f"blk.{i}", n_embd, "_exps", (n_expert,))
        else:
            made.add_ffn(f"blk.{i}", n_embd)
    made.add_norms(n_embd, "output_norm")
    made.add("output.weight", n_vocab, n_embd)
    if last is not None:
        last(writer)
    return finish_writer(writer, path)


def write_recurrent_gguf(path: Path, *, n_embd: int = 32, n_layer: int = 1) -> Path:
    """Write a Mamba model of random weights: its state cannot drop part of a sequence."""
    d_inner, d_conv, d_state, dt_rank = 2 * n_embd, 4, 8, 4
    writer = started_writer(path, "mamba", n_embd, n_layer, (0, 0, None), bos=1)
    writer.add_ssm_conv_kernel(d_conv)
    writer.add_ssm_inner_size(d_inner)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(dt_rank)
    made = Tensors(writer)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        "ssm_in.weight": (2 * d_inner, n_embd),
        "ssm_conv1d.weight": (d_inner, d_conv),
        "ssm_conv1d.bias": (d_inner,),
        "ssm_x.weight": (dt_rank + 2 * d_state, d_inner),
        "ssm_dt.weight": (d_inner, dt_rank),
        "ssm_dt.bias": (d_inner,),
        "ssm_a": (d_inner, d_state),
        "ssm_d": (d_inner,),
        "ssm_out.weight": (n_embd, d_inner),
    }
    outer = {"token_embd.weight": (N_TINY, n_embd), "output_norm.weight": (n_embd,)}
    blocks = {f"blk.{i}.{name}": shapes[name] for i in range(n_layer) for name in shapes}
    for name, shape in (*outer.items(), *blocks.items()):
        values = 0.3 * made.rng.standard_normal(shape)
        # Positive ones would let the state grow without end.
        made.put(name, -abs(values) if name.endswith("ssm_a") else values)
    return finish_writer(writer, path)


def write_window_gguf(
    path: Path,
    *,
    n_window: int = 512,
    n_ctx: int = 512,
    n_embd: int = 32,
    n_layer: int = 2,
    n_head: int = 4,
) -> Path:
    """Write a Gemma 3 model of random weights. Every other layer attends to ``n_window`` tokens."""
    sizes = (2 * n_embd, n_head, n_head)
    writer = started_writer(path, "gemma3", n_embd, n_layer, sizes, n_ctx=n_ctx, bos=1)
    writer.add_sliding_window(n_window)
    writer.add_sliding_window_pattern(2)
    writer.add_key_length(n_embd // n_head)
    writer.add_value_length(n_embd // n_head)
    made = Tensors(writer)
    made.add("token_embd.weight", N_TINY, n_embd)
    made.add_norms(n_embd, "output_norm")
    for i in range(n_layer):
        blk = f"blk.{i}"
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        made.add_norms(n_embd, *[f"{blk}.{name}" for name in norms])
        made.add_norms(n_embd // n_head, f"{blk}.attn_q_norm", f"{blk}.attn_k_norm")
        made.add_attention(blk, n_embd)
        made.add_ffn(blk, n_embd)
    return finish_writer(writer, path)


def write_hybrid_gguf(
    path: Path,
    *,
    n_ctx: int = 512,
    n_embd: int = 32,
    n_layer: int = 3,
    n_head: int = 4,
    influence: float = 1.0,
    tensors: TensorsByName | None = None,
) -> Path:
    """Write an LFM2 model of random weights, every third layer attention and the others short
    convolutions: its state can be rewound as far as it keeps copies. Layers add ``influence`` of
    what random weights would; ``tensors`` are added or replace random ones."""
    width, n_kv = 3, [n_head if i % 3 == 2 else 0 for i in range(n_layer)]
    sizes = (2 * n_embd, n_head, n_kv)
    writer = started_writer(
        path, "lfm2", n_embd, n_layer, sizes, n_ctx=n_ctx, bos=1, chat_template=CHAT_TEMPLATE
    )
    writer.add_shortconv_l_cache(width)
    made = Tensors(writer, tensors, influence)
    made.add("token_embd.weight", N_TINY, n_embd, scale=np.sqrt(n_embd))
    made.add_norms(n_embd, "token_embd_norm")
    for i in range(n_layer):
        blk = f"blk.{i}"
        made.add_norms(n_embd, f"{blk}.attn_norm", f"{blk}.ffn_norm")
        made.add_ffn(blk, n_embd)
        if n_kv[i]:
            made.add_attention(blk, n_embd)
            made.add_norms(n_embd // n_head, f"{blk}.attn_q_norm", f"{blk}.attn_k_norm")
        else:
            made.add(f"{blk}.shortconv.conv.weight", n_embd, width)
            made.add(f"{blk}.shortconv.in_proj.weight", 3 * n_embd, n_embd)
            made.add(f"{blk}.shortconv.out_proj.weight", n_embd, n_embd)
    for name, values in list(made.own.items()):
        made.put(name, values)
    return finish_writer(writer, path)


def write_learned_positions_gguf(path: Path, *, n_ctx: int, n_embd: int = 32) -> Path:
    """Write a GPT-2 model of random weights, which has learned ``n_ctx`` positions."""
    sizes = (2 * n_embd, 4, None)
    writer = started_writer(path, "gpt2", n_embd, 1, sizes, n_ctx=n_ctx, bos=1)
    writer.add_layer_norm_eps(1e-5)
    made, wide = Tensors(writer), 2 * n_embd
    made.add("token_embd.weight", N_TINY, n_embd)
    made.add("position_embd.weight", n_ctx, n_embd)
    for name, n_out, n_in in (
        ("output_norm", n_embd, 0),
        ("blk.0.attn_norm", n_embd, 0),
        ("blk.0.attn_qkv", 3 * n_embd, n_embd),
        ("blk.0.attn_output", n_embd, n_embd),
        ("blk.0.ffn_norm", n_embd, 0),
        ("blk.0.ffn_up", wide, n_embd),
        ("blk.0.ffn_down", n_embd, wide),
    ):
        if n_in:
            made.add(f"{name}.weight", n_out, n_in)
        else:
            made.add_norms(n_out, name)
        made.put(f"{name}.bias", np.zeros(n_out))
    return finish_writer(writer, path)


def write_bert_gguf(
    path: Path, pooling: PoolingType, *, n_embd: int = 32, n_ctx: int = 128
) -> Path:
    """Write a BERT model of random weights with one layer: an embedding model without a cache."""
    n_embd = 32
    writer = started_writer(path, "bert", n_embd, 1, (2 * n_embd, 4, 4), n_ctx=n_ctx, bos=1)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_token_type_count(1)
    made, wide = Tensors(writer), 2 * n_embd
    made.add("token_embd.weight", N_TINY, n_embd)
    made.add("token_types.weight", 1, n_embd)
    made.add("position_embd.weight", n_ctx, n_embd)
    for name, n_out, n_in in (
        ("token_embd_norm", n_embd, 0),
        ("blk.0.attn_q", n_embd, n_embd),
        ("blk.0.attn_k", n_embd, n_embd),
        ("blk.0.attn_v", n_embd, n_embd),
        ("blk.0.attn_output", n_embd, n_embd),
        ("blk.0.attn_output_norm", n_embd, 0),
        ("blk.0.ffn_up", wide, n_embd),
        ("blk.0.ffn_down", n_embd, wide),
        ("blk.0.layer_output_norm", n_embd, 0),
    ):
        if n_in:
            made.add(f"{name}.weight", n_out, n_in)
        else:
            made.add_norms(n_out, name)
        made.put(f"{name}.bias", np.zeros(n_out))
    return finish_writer(writer, path)


def started_writer(
    path: Path,
    architecture: str,
    n_embd: int,
    n_layer: int,
    sizes: tuple[int, int, int | Sequence[int] | None] | None = None,
    *,
    n_ctx: int = 512,
    head: int = 0,
    bos: int | None = None,
    chat_template: str | None = None,
    tensors_per_file: int = 0,
    n_bytes: int = 256,
    tokenizer: str = "llama",
) -> GGUFWriter:
    """A file with the metadata of a model, without tensors. ``sizes`` are the width of the
    feed-forward block and the numbers of heads and of key heads; ``head`` is a head's width."""
    tokens, scores, types = vocabulary(n_bytes=n_bytes)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    writer.add_name("tiny")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    if sizes is not None:
        writer.add_feed_forward_length(sizes[0])
        writer.add_head_count(sizes[1])
        if sizes[2] is not None:
            writer.add_head_count_kv(sizes[2])
        if architecture != "gpt2":
            writer.add_layer_norm_rms_eps(1e-5)
    if head:
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(tokens.index("<|end|>"))
    writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    return writer


def finish_head(
    writer: GGUFWriter,
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, npt.NDArray[np.generic] | None],
) -> Path:
    """Write a head whose file has further metadata and these tensors; None leaves one out."""
    for key, value in metadata.items():
        if value is not None:
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind
            writer.add_key_value(key, value, kind)
    for name, values in tensors.items():
        if values is not None:
            i64 = GGMLQuantizationType.I64 if values.dtype == np.int64 else None
            writer.add_tensor(name, values, raw_dtype=i64)
    return finish_writer(writer, path)


def finish_writer(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
