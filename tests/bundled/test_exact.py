"""``exact``: the same text as plain decoding of it alone, with usual weights."""

from __future__ import annotations

from typing import Any

import pytest

from batching.errors import InvalidParameter
from batching.llama.context import ContextParams
from batching.llama.exact import equal_rows
from batching.llama.model import Model
from speculation.engine import Engine
from speculation.registry import resolve

COPIED = "one two three four five six seven eight nine ten "
PROMPTS = [
    "Tell me a story about a cat.",
    f"Repeat this: {20 * COPIED}",
    f"Repeat this: {20 * COPIED} What is next?",
    "What is 3 + 4?",
]
MORE = "And then?"


def test_no_number_of_rows_changes_the_bits_of_a_row() -> None:
    """Without ``exact`` a single row attends in another way than two, from 512 cells on."""
    with Model(resolve("bundled"), repack=False) as model:
        usual = ContextParams(n_ctx=1024, n_threads=2, flash_attn="on")
        assert equal_rows(model, usual) == 1
        assert equal_rows(model, ContextParams(n_ctx=1024, n_threads=2, exact=True)) == 64


def test_exact_texts_are_those_of_plain_decoding_alone() -> None:
    settings: list[dict[str, Any]] = 2 * [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}]
    with Engine.load("bundled", exact=True, n_ctx=2048) as engine:

        def turns(prompt: str, method: str, sampling: dict[str, Any]) -> list[str]:
            first = engine.chat(prompt, method=method, max_tokens=48, **sampling).run().text
            said = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": first},
                {"role": "user", "content": MORE},
            ]
            second = engine.chat(said, method=method, max_tokens=32, **sampling).run().text
            return [first, second]

        assert engine.context.params.n_ubatch == 64
        plain = []
        for prompt, sampling in zip(PROMPTS, settings, strict=True):
            engine.generate([1], method="ar", max_tokens=1).run()  # shares nothing with the next
            plain.append(turns(prompt, "ar", sampling))
        for method in ("auto", "recycling", "jacobi"):
            found = [turns(*of) for of in zip(PROMPTS, [method] * 4, settings, strict=True)]
            assert found == plain, method
        assert engine.context.n_seq_max == 1  # trees are cut to a path, so that cells stay in order
        with pytest.raises(InvalidParameter, match="lookahead needs several branches, and with"):
            engine.generate("a", method="lookahead", max_tokens=4).run()
    with Engine.load("bundled", exact=True, parallel=3) as engine:
        assert engine.context.text_limit == 2048  # of each
        texts = [
            engine.chat(prompt, method=method, max_tokens=48, **sampling)
            for method in ("auto", "ar")
            for prompt, sampling in zip(PROMPTS, settings, strict=True)
        ]
        assert [text.run().text for text in texts] == 2 * [first for first, _ in plain]


def test_exact_needs_a_cache_whose_rows_are_read_in_one_way() -> None:
    others: list[dict[str, Any]] = [{"kv_type": "f32"}, {"flash_attn": "off"}]
    for other in others:
        with pytest.raises(InvalidParameter, match="needs flash attention and a KV cache of f16"):
            ContextParams(exact=True, **other)
