"""A context may be as long as the texts that a model was trained to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter
from batching.llama.context import Context, choose_flash_attn
from batching.llama.create import max_tokens
from batching.llama.model import Model
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf


def test_a_context_longer_than_a_model_was_trained_for_is_refused(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        with pytest.raises(InvalidParameter) as refused:
            Context(model, replace(EXACT, n_ctx=200_000))
        assert str(refused.value) == (
            f"a context of 200,000 tokens is too long for {tiny_model}, which was trained for 512; "
            "lower n_ctx to 512 or less"
        )
        with pytest.raises(InvalidParameter, match="for 512, in each of 3 texts; lower n_ctx to 1"):
            Context(model, replace(EXACT, n_ctx=2000, n_slots=3))
        for n_ctx, n_slots, n_cells in ((512, 1, 512), (0, 1, 512), (1536, 3, 1536)):
            with Context(model, replace(EXACT, n_ctx=n_ctx, n_slots=n_slots)) as context:
                assert context.n_ctx == n_cells
        choose_flash_attn(model, replace(EXACT, flash_attn="auto"), budget_seconds=0.01)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 512),
        ({"type": "none", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 8.0, "original_context_length": 128}, 1024),
        ({"type": "longrope", "original_context_length": 128}, 512),
    ],
)
def test_rope_scaling_lengthens_what_a_model_can_read(
    scaling: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    def add(writer: Any) -> None:
        for name, value in scaling.items():
            key = f"llama.rope.scaling.{name}"
            kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            kinds[type(value)](key, value)

    with Model(write_tiny_gguf(tmp_path / "tiny.gguf", more=add)) as model:
        assert max_tokens(model) == longest
        with Context(model, replace(EXACT, n_ctx=longest)) as context:
            assert context.n_ctx == longest
        with pytest.raises(InvalidParameter, match=f"for {longest:,}; lower n_ctx"):
            Context(model, replace(EXACT, n_ctx=longest + 1))
