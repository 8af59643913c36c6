"""A Llama layer in plain NumPy: the reference for llama.cpp and PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from batching.tree import Floats

N_HEAD = 4


def rms_norm(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


def rotated(x: Floats, slower: Floats | None = None) -> Floats:
    """Pairs (x[2i], x[2i + 1]) of each head rotated by their position; x is (time, heads, size).

    ``slower`` divides the rotation frequency of each pair, (size / 2,).
    """
    out = x.copy()
    size = x.shape[2]
    for place in range(len(x)):
        for i in range(size // 2):
            angle = place * 10_000.0 ** (-2 * i / size) / (1 if slower is None else slower[i])
            even, odd = x[place, :, 2 * i], x[place, :, 2 * i + 1]
            out[place, :, 2 * i] = even * np.cos(angle) - odd * np.sin(angle)
            out[place, :, 2 * i + 1] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def layer(w: Mapping[str, Floats], inner: Floats, residual: Floats, block: int = 0) -> Floats:
    """``residual``, (time, width), after attention over ``inner`` and the feed-forward block."""

    def weight(name: str) -> Floats:
        return w[f"blk.{block}.{name}.weight"].T

    n, n_embd = residual.shape
    size = n_embd // N_HEAD
    slower = w.get("rope_freqs.weight")
    q = rotated((inner @ weight("attn_q")).reshape(n, N_HEAD, size), slower)
    k = rotated((inner @ weight("attn_k")).reshape(n, -1, size), slower)
    v = (inner @ weight("attn_v")).reshape(n, -1, size)
    shared = N_HEAD // k.shape[1]
    mixed: Floats = np.zeros((n, N_HEAD, size), np.float32)
    for head in range(N_HEAD):
        scores = q[:, head] @ k[:, head // shared].T / np.sqrt(size)
        scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed[:, head] = weights @ v[:, head // shared]
    y = residual + mixed.reshape(n, n_embd) @ weight("attn_output")
    normed = rms_norm(y, weight("ffn_norm"))
    gate = normed @ weight("ffn_gate")
    return y + (gate / (1 + np.exp(-gate)) * (normed @ weight("ffn_up"))) @ weight("ffn_down")
