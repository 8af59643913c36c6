"""The bundled model decoded by every method: exact in F32, and near-ties alone as it is shipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import llama_cpp.llama_cpp as native
import pytest

from batching.context import ContextParams
from speculation.bench.prompt_file import read_prompts, select_prompts
from speculation.bench.results import Run
from speculation.bench.run import Plan, measure, with_baseline
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.registry import resolve
from speculation.sampling import SamplingParams

METHODS = with_baseline(
    [
        parse_method(text)
        for text in ("prompt-lookup", "prompt-lookup:branches=4", "jacobi:guesses=4", "lookahead")
    ]
)
EXACT = ContextParams(kv_type="f32", flash_attn="off", n_threads=1)


@pytest.fixture(scope="module")
def f32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with its weights written out as F32."""
    path = tmp_path_factory.mktemp("models") / "bundled-f32.gguf"
    params = native.llama_model_quantize_default_params()
    params.ftype = native.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    source = os.fsencode(resolve("bundled"))
    assert native.llama_model_quantize(source, os.fsencode(path), params) == 0
    return path


def runs(model: Path, params: ContextParams, sampling: SamplingParams) -> Iterator[Run]:
    """Every method on a built-in prompt of each kind, all of its turns, 48 tokens."""
    with Engine.load(model, params) as engine:
        prompts = select_prompts(read_prompts("builtin"), categories=None, limit=1)
        for finished in measure(
            engine, prompts, Plan(METHODS, sampling, n_predict=48), lambda *_: None
        ):
            assert isinstance(finished, list), f"left out: {finished}"
            yield from finished


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, seed=1, top_p=0.95, repeat_penalty=1.1)],
    ids=["greedy", "seeded"],
)
def test_with_f32_weights_and_cache_every_text_is_plain_decodings(
    f32_model: Path, sampling: SamplingParams
) -> None:
    done = list(runs(f32_model, EXACT, sampling))
    assert len(done) > 50
    assert [run for run in done if run.first_difference is not None] == []
    assert sum(run.n_accepted for run in done) > 200


def test_as_shipped_texts_differ_only_where_two_tokens_are_almost_equally_likely() -> None:
    done = list(runs(resolve("bundled"), ContextParams(n_threads=1), SamplingParams()))
    gaps = [run.first_difference.logit_gap for run in done if run.first_difference is not None]
    assert all(gap is not None and abs(gap) < 0.2 for gap in gaps), gaps
    assert len(gaps) < 0.1 * len(done)
