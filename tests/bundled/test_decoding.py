"""The bundled model decoded by every method: exact in F32, as shipped except at close logits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as native
import pytest

from batching.gguf.reader import fingerprint
from batching.llama.context import ContextParams
from speculation.bench.prompt_file import read_prompts, select_prompts
from speculation.bench.results import Run
from speculation.bench.run import Plan, measure, with_baseline
from speculation.drafter import Method
from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.registry import paired_heads, resolve
from speculation.runtime import Runtime
from speculation.sampling import SamplingParams
from tests.support.exact import EXACT
from tests.support.paths import ROOT

pytestmark = pytest.mark.long


def methods(*texts: str) -> list[Method]:
    return with_baseline([parse_method(text) for text in texts])


METHODS = methods(
    "prompt-lookup",
    "suffix:branches=4,p_min=0.1",
    "jacobi:guesses=4",
    "lookahead:window=5,guesses=5",
)
ON_TWO_CATEGORIES = methods(
    *"lookahead draft draft:width=3,nodes=12 recycling medusa medusa:nodes=5".split(),
    *"redrafter redrafter:beams=1,length=3 eagle-1 eagle-2 eagle-2:top_k=1,depth=3".split(),
    *"eagle-3 auto".split(),
)
GREEDY_AND_SEEDED = pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, seed=1, top_p=0.95, repeat_penalty=1.1)],
    ids=["greedy", "seeded"],
)


@pytest.fixture(scope="module")
def f32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with its weights converted to F32."""
    path = tmp_path_factory.mktemp("models") / "bundled-f32.gguf"
    params = native.llama_model_quantize_default_params()
    params.ftype = native.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    source = os.fsencode(resolve("bundled"))
    assert native.llama_model_quantize(source, os.fsencode(path), params) == 0
    return path


@pytest.fixture(scope="module")
def f32_heads(tmp_path_factory: pytest.TempPathFactory, f32_model: Path) -> list[Path]:
    """The bundled heads, marked as trained on the F32 model, which would otherwise refuse them."""
    folder = tmp_path_factory.mktemp("heads")
    made = []
    for name in paired_heads("bundled"):
        source = resolve(name)
        made.append(folder / source.name)
        ours, theirs = fingerprint(resolve("bundled")), fingerprint(f32_model)
        made[-1].write_bytes(source.read_bytes().replace(ours.encode(), theirs.encode()))
    return made


def runs(
    model: Path,
    params: ContextParams,
    methods: Sequence[Method],
    sampling: SamplingParams | None = None,
    *,
    categories: list[str] | None = None,
    **paired: Any,
) -> list[Run]:
    """Every method on one built-in prompt of each category: all turns, 48 tokens each."""
    done: list[Run] = []
    with Engine.load(model, params, **paired) as engine:
        prompts = select_prompts(read_prompts("builtin"), categories=categories, limit=1)
        plan = Plan(methods, sampling or SamplingParams(), n_predict=48)
        for finished in measure(engine, prompts, plan):
            assert isinstance(finished, list), f"left out: {finished}"
            done += finished
    return done


@GREEDY_AND_SEEDED
def test_in_f32_methods_with_few_rows_change_no_text_of_any_category(
    f32_model: Path, sampling: SamplingParams
) -> None:
    done = runs(f32_model, EXACT, METHODS, sampling)
    assert len(done) > 50
    assert [run for run in done if run.first_difference is not None] == []
    assert sum(run.stats.n_accepted for run in done) > 200


@GREEDY_AND_SEEDED
def test_in_f32_no_other_method_changes_a_text(
    f32_model: Path,
    f32_heads: list[Path],
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rows this cheap make auto draft on any machine.
    cheap = Cost(CostCurve.linear(5e-3, 4e-5))
    monkeypatch.setattr(Runtime, "_first_cost", lambda runtime: cheap)
    monkeypatch.setattr(cheap, "follow", lambda *step: None)
    monkeypatch.setattr("speculation.auto.learnt.save", lambda *kept: None)
    paired = {"draft_model": "bundled-draft", "heads": f32_heads}
    kinds = ["chat", "extraction"]
    done = runs(f32_model, EXACT, ON_TWO_CATEGORIES, sampling, categories=kinds, **paired)
    assert [run for run in done if run.first_difference is not None] == []
    accepted = {run.method: 0 for run in done if run.method != "ar"}
    for run in done:
        if run.method in accepted:
            accepted[run.method] += run.stats.n_accepted
    assert len(accepted) == len(ON_TWO_CATEGORIES) - 1
    assert min(accepted.values()) > 0, accepted


def test_as_shipped_texts_differ_only_where_two_logits_are_close() -> None:
    wide = methods("lookahead")[1:]
    done = runs(resolve("bundled"), ContextParams(n_threads=1), [*METHODS, *wide])
    gaps = [run.first_difference.logit_gap for run in done if run.first_difference is not None]
    # In one of these texts, a gap is 0.25 with flash attention, 0.25 without it, 0.35 without it if
    # the reply is decoded in one batch, and 0.05 with an F32 KV cache: the kernels' own noise.
    assert all(gap is not None and abs(gap) < 0.4 for gap in gaps), gaps
    assert len(gaps) < 0.1 * len(done)


def test_a_cut_reply_continues_as_if_it_had_not_been_cut(f32_model: Path) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a ship."}]
    with Engine.load(f32_model, EXACT) as engine:
        whole = engine.chat(messages, method="ar", max_tokens=40).run()
        for n in (1, 7, 20):
            start = engine.chat(messages, method="ar", max_tokens=n).run().text
            continued = [*messages, {"role": "assistant", "content": start}]
            rest = engine.chat(continued, method="prompt-lookup", max_tokens=40 - n).run()
            assert start + rest.text == whole.text
            assert rest.stats.n_reused >= whole.stats.n_prompt


def test_the_example_in_python_runs_a_method_of_its_own() -> None:
    script = ROOT / "examples" / "use_from_python.py"
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "[" in done.stdout.splitlines()[0]  # drafted tokens
    assert "tokens per step, " in done.stdout
