"""Random GGUFs with an MTP layer whose drafts are sometimes accepted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from batching.gguf.reader import GGUFFile
from tests.support.tiny_gguf import CHAT_TEMPLATE, finish_writer, started_writer, vocabulary

N_EMBD, N_LAYER, N_HEAD, HEAD = 32, 3, 2, 16


class _Tensors:
    """Adds random tensors to a file."""

    def __init__(self, writer: GGUFWriter) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(0)

    def add(self, name: str, *shape: int, scale: float = 1.6) -> None:
        weight = scale / np.sqrt(shape[-1]) * self._rng.standard_normal(shape)
        self._writer.add_tensor(name, weight.astype(np.float32))

    def add_norm(self, name: str, n: int = N_EMBD, value: float = 1.0) -> None:
        self._writer.add_tensor(name, np.full(n, value, np.float32))

    def add_outer(self) -> None:
        n_vocab = len(vocabulary()[0])
        self.add("token_embd.weight", n_vocab, N_EMBD, scale=np.sqrt(N_EMBD))
        self.add_norm("output_norm.weight")
        self.add("output.weight", n_vocab, N_EMBD, scale=12.0)

    def add_attention(self, blk: str, scale: float, *, gate: bool, post: float = 1.0) -> None:
        self.add_norm(f"{blk}.attn_norm.weight")
        self.add_norm(f"{blk}.post_attention_norm.weight", value=post)
        width = N_HEAD * HEAD
        self.add(f"{blk}.attn_q.weight", 2 * width if gate else width, N_EMBD)
        self.add(f"{blk}.attn_k.weight", width, N_EMBD)
        self.add(f"{blk}.attn_v.weight", width, N_EMBD)
        self.add(f"{blk}.attn_output.weight", N_EMBD, width, scale=scale)
        self.add_norm(f"{blk}.attn_q_norm.weight", HEAD)
        self.add_norm(f"{blk}.attn_k_norm.weight", HEAD)

    def add_ffn(self, blk: str, scale: float, part: str = "", n: tuple[int, ...] = ()) -> None:
        self.add(f"{blk}.ffn_gate{part}.weight", *n, 2 * N_EMBD, N_EMBD)
        self.add(f"{blk}.ffn_up{part}.weight", *n, 2 * N_EMBD, N_EMBD)
        self.add(f"{blk}.ffn_down{part}.weight", *n, N_EMBD, 2 * N_EMBD, scale=scale)

    def add_mtp(self, blk: str, of_state: float) -> None:
        """The tensors that add ``of_state`` of a random function of the state to the token."""
        state = of_state / np.sqrt(N_EMBD) * self._rng.standard_normal((N_EMBD, N_EMBD))
        both = np.hstack([np.eye(N_EMBD), state]).astype(np.float32)
        self._writer.add_tensor(f"{blk}.nextn.eh_proj.weight", both)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self.add_norm(f"{blk}.nextn.{name}.weight")


def write_mtp_gguf(
    path: Path,
    *,
    influence: float = 0.02,
    of_state: float = 0.0,
    alone: bool = False,
    n_mtp: int = 1,
    tensors_per_file: int = 0,
) -> Path:
    """Write a Qwen 3.5 model, recurrent but for its third layer, and a fourth layer that predicts.

    Layers add ``influence`` of what random weights would. The fourth adds only ``of_state`` of a
    random function of the state to its token: it drafts what mostly follows the token. The less
    these add, the more drafts are accepted. ``alone`` leaves out all other layers; ``n_mtp`` layers
    predict.
    """
    d_state, n_keys, n_values = 8, 2, 4
    writer = _begun(path, "qwen35", tensors_per_file, n_mtp)
    writer.add_rope_dimension_sections([2, 2, 2, 2])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(d_state * n_values)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(n_values)
    writer.add_ssm_group_count(n_keys)
    writer.add_uint32("qwen35.full_attention_interval", 3)

    tensors, scale = _Tensors(writer), 1.6 * influence
    tensors.add_outer()
    width = d_state * (2 * n_keys + n_values)
    for i in range(0 if alone else N_LAYER):
        blk = f"blk.{i}"
        tensors.add_ffn(blk, scale)
        if i == 2:
            tensors.add_attention(blk, scale, gate=True)
            continue
        tensors.add_norm(f"{blk}.attn_norm.weight")
        tensors.add_norm(f"{blk}.post_attention_norm.weight")
        tensors.add(f"{blk}.attn_qkv.weight", width, N_EMBD)
        tensors.add(f"{blk}.attn_gate.weight", d_state * n_values, N_EMBD)
        tensors.add(f"{blk}.ssm_conv1d.weight", width, 4)
        tensors.add(f"{blk}.ssm_dt.bias", n_values)
        writer.add_tensor(f"{blk}.ssm_a", -np.arange(1, n_values + 1, dtype=np.float32))
        tensors.add(f"{blk}.ssm_beta.weight", n_values, N_EMBD)
        tensors.add(f"{blk}.ssm_alpha.weight", n_values, N_EMBD)
        tensors.add_norm(f"{blk}.ssm_norm.weight", d_state)
        tensors.add(f"{blk}.ssm_out.weight", N_EMBD, d_state * n_values, scale=scale)
    for i in range(N_LAYER, N_LAYER + n_mtp):
        blk = f"blk.{i}"
        tensors.add_ffn(blk, 0.0)
        tensors.add_attention(blk, 0.0, gate=True)
        tensors.add_mtp(blk, of_state)
    return finish_writer(writer, path)


def write_mtp_gguf_with_kv(
    path: Path, *, influence: float = 0.02, of_state: float = 0.0, without: bool = False
) -> Path:
    """The same as a GLM 4.5 model, which has only a KV cache. ``without`` leaves out the layer that
    predicts but keeps its metadata."""
    writer = _begun(path, "glm4moe")
    writer.add_leading_dense_block_count(N_LAYER)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(2 * N_EMBD)

    tensors, scale = _Tensors(writer), 1.6 * influence
    tensors.add_outer()
    for i in range(N_LAYER):
        tensors.add_attention(f"blk.{i}", scale, gate=False)
        tensors.add_ffn(f"blk.{i}", scale)
    if not without:
        blk = f"blk.{N_LAYER}"
        tensors.add_attention(blk, 0.0, gate=False)
        tensors.add(f"{blk}.ffn_gate_inp.weight", 2, N_EMBD)
        tensors.add(f"{blk}.exp_probs_b.bias", 2)
        tensors.add_ffn(blk, 0.0, "_exps", (2,))
        tensors.add_ffn(blk, 0.0, "_shexp")
        tensors.add_mtp(blk, of_state)
    return finish_writer(writer, path)


def write_gemma_gguf(path: Path, *, influence: float = 0.05, window: int = 8) -> Path:
    """Write a Gemma 4 model whose layers add ``influence`` each, with a sliding window in all but
    the last. Its drafts come from a separate model, ``write_assistant_gguf``."""
    writer = _begun_gemma(path, "gemma4", N_EMBD, [True, True, False], window)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    tensors = _Tensors(writer)
    tensors.add_outer()
    for i in range(N_LAYER):
        blk = f"blk.{i}"
        tensors.add_attention(blk, 1.6, gate=False, post=influence)
        tensors.add_norm(f"{blk}.ffn_norm.weight")
        tensors.add_norm(f"{blk}.post_ffw_norm.weight", value=influence)
        tensors.add_ffn(blk, 1.6)
    tensors.add_norm("rope_freqs.weight", HEAD // 2)
    return finish_writer(writer, path)


def write_assistant_gguf(path: Path, target: Path, *, of_state: float = 0.0, n: int = 2) -> Path:
    """Write the assistant of ``target``, ``n`` times as wide: it embeds the token with the target's
    own matrices, so it predicts what mostly follows."""
    file, width = GGUFFile(target), n * N_EMBD
    writer = _begun_gemma(path, "gemma4-assistant", width, [True, False])
    writer.add_uint32("gemma4-assistant.embedding_length_out", N_EMBD)
    writer.add_nextn_predict_layers(2)
    rng = np.random.default_rng(1)
    pre = np.zeros((width, 2 * N_EMBD), np.float32)
    pre[:N_EMBD, :N_EMBD] = np.eye(N_EMBD)
    pre[:, N_EMBD:] = of_state * rng.standard_normal((width, N_EMBD))
    output = file.output_matrix()
    known = np.hstack([output, np.zeros((len(output), width - N_EMBD), np.float32)])
    writer.add_tensor("token_embd.weight", known)
    writer.add_tensor("nextn.pre_projection.weight", pre)
    tensors = _Tensors(writer)
    tensors.add("nextn.post_projection.weight", N_EMBD, width)
    tensors.add_norm("output_norm.weight", width)
    for i in range(2):
        blk = f"blk.{i}"
        tensors.add_norm(f"{blk}.attn_norm.weight", width)
        tensors.add(f"{blk}.attn_q.weight", N_HEAD * HEAD, width)
        tensors.add(f"{blk}.attn_output.weight", width, N_HEAD * HEAD)
        tensors.add_norm(f"{blk}.attn_q_norm.weight", HEAD)
        tensors.add_norm(f"{blk}.post_attention_norm.weight", width, 0.02)
        tensors.add_norm(f"{blk}.layer_output_scale.weight", 1)
        tensors.add_norm(f"{blk}.ffn_norm.weight", width)
        tensors.add_norm(f"{blk}.post_ffw_norm.weight", width, 0.02)
        tensors.add(f"{blk}.ffn_gate.weight", N_EMBD, width)
        tensors.add(f"{blk}.ffn_up.weight", N_EMBD, width)
        tensors.add(f"{blk}.ffn_down.weight", width, N_EMBD)
    tensors.add_norm("rope_freqs.weight", HEAD // 2)
    return finish_writer(writer, path)


def _begun_gemma(
    path: Path, architecture: str, width: int, windows: list[bool], window: int = 8
) -> GGUFWriter:
    writer = started_writer(path, architecture, 512, width, len(windows), CHAT_TEMPLATE)
    writer.add_bos_token_id(1)
    writer.add_feed_forward_length(2 * N_EMBD if architecture == "gemma4" else N_EMBD)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    for kind in ("", "_swa"):
        writer.add_uint32(f"{architecture}.attention.key_length{kind}", HEAD)
        writer.add_uint32(f"{architecture}.attention.value_length{kind}", HEAD)
        writer.add_uint32(f"{architecture}.rope.dimension_count{kind}", HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(0)
    return writer


def write_mtp_header(path: Path, architecture: str) -> Path:
    """Write only the header of a model with an MTP layer."""
    writer = _begun(path, architecture)
    tensors = _Tensors(writer)
    tensors.add_norm("blk.0.attn_norm.weight")
    tensors.add_mtp(f"blk.{N_LAYER}", 0.0)
    return finish_writer(writer, path)


def _begun(path: Path, architecture: str, tensors_per_file: int = 0, n_mtp: int = 1) -> GGUFWriter:
    n_layer = N_LAYER + n_mtp
    writer = started_writer(
        path, architecture, 512, N_EMBD, n_layer, CHAT_TEMPLATE, tensors_per_file
    )
    writer.add_bos_token_id(1)
    writer.add_feed_forward_length(2 * N_EMBD)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_nextn_predict_layers(n_mtp)
    return writer
