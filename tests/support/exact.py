"""A context in which equal texts stay equal, and a prompt, for tests that compare texts."""

from __future__ import annotations

from batching.llama.context import ContextParams

# F32 weights, an F32 cache and no flash attention: batched and single rows give equal floats.
EXACT = ContextParams(kv_type="f32", flash_attn="off", n_threads=1)
PROMPT = "the cat saw a dog and the cat saw a dog and the"
