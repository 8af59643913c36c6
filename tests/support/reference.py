"""A Llama layer in plain NumPy: the reference for llama.cpp and PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from batching.tree import Floats

N_HEAD = 4


def rms_norm(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


def rotated(x: Floats, slower: Floats | None = None, *, halves: bool = False) -> Floats:
    """Pairs of each head rotated by their position; x is (time, heads, size).

    A pair is x[2i] and x[2i + 1], or with ``halves`` x[i] and x[i + size / 2]. ``slower`` divides
    the rotation frequency of each pair, (size / 2,).
    """
    half = x.shape[2] // 2
    speeds = 10_000.0 ** (-np.arange(half) / half) / (1 if slower is None else slower)
    angles = np.arange(len(x))[:, None, None] * speeds
    a, b = (x[..., :half], x[..., half:]) if halves else (x[..., 0::2], x[..., 1::2])
    turned = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
    joined = np.concatenate(turned, 2) if halves else np.stack(turned, 3).reshape(x.shape)
    return joined.astype(np.float32)


def layer(
    w: Mapping[str, Floats], inner: Floats, residual: Floats, block: int = 0, *, causal: bool = True
) -> Floats:
    """``residual``, (time, width), after attention over ``inner`` and the feed-forward block.

    Rows are the last of ``inner``. Without ``causal`` each attends to all; as in DFlash, pairs are
    halves then, and queries and keys are normalised.
    """

    def weight(name: str) -> Floats:
        return w[f"blk.{block}.{name}.weight"]

    n, n_all, size = len(residual), len(inner), residual.shape[1] // N_HEAD
    slower = w.get("rope_freqs.weight")
    q, k, v = (
        (inner @ weight(f"attn_{name}").T).reshape(n_all, -1, size) for name in ("q", "k", "v")
    )
    if not causal:
        q, k = rms_norm(q, weight("attn_q_norm")), rms_norm(k, weight("attn_k_norm"))
    q = rotated(q, slower, halves=not causal)[-n:]
    k = rotated(k, slower, halves=not causal)
    mixed: Floats = np.zeros((n, N_HEAD, size), np.float32)
    for head in range(N_HEAD):
        of = head // (N_HEAD // k.shape[1])
        scores = q[:, head] @ k[:, of].T / np.sqrt(size)
        if causal:
            scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed[:, head] = weights @ v[:, of]
    y = residual + mixed.reshape(n, -1) @ weight("attn_output").T
    normed = rms_norm(y, weight("ffn_norm"))
    gate = normed @ weight("ffn_gate").T
    silu = gate / (1 + np.exp(-gate))
    return y + (silu * (normed @ weight("ffn_up").T)) @ weight("ffn_down").T
