"""Random GGUFs with an MTP layer whose drafts are sometimes accepted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from batching.gguf.reader import GGUFFile
from tests.support.tiny_gguf import CHAT_TEMPLATE, N_TINY, Tensors, finish_writer, started_writer

N_EMBD, N_LAYER, N_HEAD, HEAD = 32, 3, 2, 16


class _Tensors(Tensors):
    """Tensors of models whose heads have a width of their own."""

    def add_outer(self) -> None:
        self.add("token_embd.weight", N_TINY, N_EMBD, scale=np.sqrt(N_EMBD))
        self.add_norms(N_EMBD, "output_norm")
        self.add("output.weight", N_TINY, N_EMBD, scale=12.0)

    def add_gated_attention(self, blk: str, scale: float, *, gate: bool, post: float = 1.0) -> None:
        self.add_norms(N_EMBD, f"{blk}.attn_norm")
        self.add_norms(N_EMBD, f"{blk}.post_attention_norm", value=post)
        width = N_HEAD * HEAD
        self.add(f"{blk}.attn_q.weight", 2 * width if gate else width, N_EMBD)
        self.add(f"{blk}.attn_k.weight", width, N_EMBD)
        self.add(f"{blk}.attn_v.weight", width, N_EMBD)
        self.add(f"{blk}.attn_output.weight", N_EMBD, width, scale=scale)
        self.add_norms(HEAD, f"{blk}.attn_q_norm", f"{blk}.attn_k_norm")

    def add_mtp(self, blk: str, of_state: float) -> None:
        """The tensors that add ``of_state`` of a random function of the state to the token."""
        state = of_state / np.sqrt(N_EMBD) * self.rng.standard_normal((N_EMBD, N_EMBD))
        self.put(f"{blk}.nextn.eh_proj.weight", np.hstack([np.eye(N_EMBD), state]))
        self.add_norms(
            N_EMBD, *(f"{blk}.nextn.{name}" for name in ("enorm", "hnorm", "shared_head_norm"))
        )


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
        tensors.add_ffn(blk, N_EMBD, scale=scale)
        if i == 2:
            tensors.add_gated_attention(blk, scale, gate=True)
            continue
        tensors.add_norms(N_EMBD, f"{blk}.attn_norm")
        tensors.add_norms(N_EMBD, f"{blk}.post_attention_norm")
        tensors.add(f"{blk}.attn_qkv.weight", width, N_EMBD)
        tensors.add(f"{blk}.attn_gate.weight", d_state * n_values, N_EMBD)
        tensors.add(f"{blk}.ssm_conv1d.weight", width, 4)
        tensors.add(f"{blk}.ssm_dt.bias", n_values)
        writer.add_tensor(f"{blk}.ssm_a", -np.arange(1, n_values + 1, dtype=np.float32))
        tensors.add(f"{blk}.ssm_beta.weight", n_values, N_EMBD)
        tensors.add(f"{blk}.ssm_alpha.weight", n_values, N_EMBD)
        tensors.add_norms(d_state, f"{blk}.ssm_norm")
        tensors.add(f"{blk}.ssm_out.weight", N_EMBD, d_state * n_values, scale=scale)
    for i in range(N_LAYER, N_LAYER + n_mtp):
        blk = f"blk.{i}"
        tensors.add_ffn(blk, N_EMBD, scale=0.0)
        tensors.add_gated_attention(blk, 0.0, gate=True)
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
        tensors.add_gated_attention(f"blk.{i}", scale, gate=False)
        tensors.add_ffn(f"blk.{i}", N_EMBD, scale=scale)
    if not without:
        blk = f"blk.{N_LAYER}"
        tensors.add_gated_attention(blk, 0.0, gate=False)
        tensors.add(f"{blk}.ffn_gate_inp.weight", 2, N_EMBD)
        tensors.add(f"{blk}.exp_probs_b.bias", 2)
        tensors.add_ffn(blk, N_EMBD, "_exps", (2,), scale=0.0)
        tensors.add_ffn(blk, N_EMBD, "_shexp", scale=0.0)
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
        tensors.add_gated_attention(blk, 1.6, gate=False, post=influence)
        tensors.add_norms(N_EMBD, f"{blk}.ffn_norm")
        tensors.add_norms(N_EMBD, f"{blk}.post_ffw_norm", value=influence)
        tensors.add_ffn(blk, N_EMBD, scale=1.6)
    tensors.add_norms(HEAD // 2, "rope_freqs")
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
    tensors.add_norms(width, "output_norm")
    for i in range(2):
        blk = f"blk.{i}"
        tensors.add_norms(width, f"{blk}.attn_norm")
        tensors.add(f"{blk}.attn_q.weight", N_HEAD * HEAD, width)
        tensors.add(f"{blk}.attn_output.weight", width, N_HEAD * HEAD)
        tensors.add_norms(HEAD, f"{blk}.attn_q_norm")
        tensors.add_norms(width, f"{blk}.post_attention_norm", value=0.02)
        tensors.add_norms(1, f"{blk}.layer_output_scale")
        tensors.add_norms(width, f"{blk}.ffn_norm")
        tensors.add_norms(width, f"{blk}.post_ffw_norm", value=0.02)
        tensors.add(f"{blk}.ffn_gate.weight", N_EMBD, width)
        tensors.add(f"{blk}.ffn_up.weight", N_EMBD, width)
        tensors.add(f"{blk}.ffn_down.weight", width, N_EMBD)
    tensors.add_norms(HEAD // 2, "rope_freqs")
    return finish_writer(writer, path)


def _begun_gemma(
    path: Path, architecture: str, width: int, windows: list[bool], window: int = 8
) -> GGUFWriter:
    sizes = (2 * N_EMBD if architecture == "gemma4" else N_EMBD, N_HEAD, N_HEAD)
    writer = started_writer(
        path, architecture, width, len(windows), sizes, bos=1, chat_template=CHAT_TEMPLATE
    )
    for kind in ("", "_swa"):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"{architecture}.{key}{kind}", HEAD)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(0)
    return writer


def write_mtp_header(path: Path, architecture: str) -> Path:
    """Write only the header of a model with an MTP layer."""
    writer = _begun(path, architecture)
    tensors = _Tensors(writer)
    tensors.add_norms(N_EMBD, "blk.0.attn_norm")
    tensors.add_mtp(f"blk.{N_LAYER}", 0.0)
    return finish_writer(writer, path)


def _begun(path: Path, architecture: str, tensors_per_file: int = 0, n_mtp: int = 1) -> GGUFWriter:
    writer = started_writer(
        path, architecture, N_EMBD, N_LAYER + n_mtp, (2 * N_EMBD, N_HEAD, N_HEAD), head=HEAD,
        bos=1, chat_template=CHAT_TEMPLATE, tensors_per_file=tensors_per_file,
    )  # fmt: skip
    writer.add_nextn_predict_layers(n_mtp)
    return writer
