"""A context in which equal texts stay equal, a prompt, and texts that must be equal in it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from batching.llama.context import ContextParams
from speculation.engine import Engine
from speculation.reply import Reply
from speculation.sampling import SamplingParams

# F32 weights, an F32 cache and no flash attention: batched and single rows give equal floats.
EXACT = ContextParams(kv_type="f32", flash_attn="off", n_threads=1)
PROMPT = "the cat saw a dog and the cat saw a dog and the"


def endless(engine: Engine, temperature: float = 0.0, seed: int = 3) -> SamplingParams:
    """Sampling that never ends a text."""
    ends = dict.fromkeys(engine.model.ends, -math.inf)
    return SamplingParams(temperature=temperature, seed=seed, logit_bias=ends)


def same_texts(engine: Engine, prompt: Any, *methods: str, **settings: Any) -> list[Reply]:
    """The texts of plain decoding and of ``methods``, whose tokens must be the same."""
    texts = [engine.generate(prompt, method=m, **settings).run() for m in ("ar", *methods)]
    for method, text in zip(methods, texts[1:], strict=True):
        assert text.token_ids == texts[0].token_ids, method
    return texts


def random_requests(
    rng: random.Random, n: int, methods: Sequence[str], **more: Sequence[object]
) -> list[dict[str, Any]]:
    """Prompts of different lengths with any of the methods, samplings and further settings."""
    samplings = (SamplingParams(), SamplingParams(temperature=0.9, seed=7, repeat_penalty=1.2))
    words = PROMPT.split()
    return [
        {
            "prompt": " ".join([*rng.choices(words, k=rng.randrange(60)), PROMPT]),
            "method": rng.choice(methods),
            "sampling": rng.choice(samplings),
            "max_tokens": rng.randrange(1, 40),
            **{name: rng.choice(values) for name, values in more.items()},
        }
        for _ in range(n)
    ]
