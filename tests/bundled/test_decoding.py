"""The bundled model decoded by every method: exact in F32, as shipped except at close logits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
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


FEW_ROWS = (
    "prompt-lookup suffix:branches=4,p_min=0.1 jacobi:guesses=4 lookahead:window=5,guesses=5"
).split()
MORE = (
    "lookahead draft draft:width=3,nodes=12 recycling medusa medusa:nodes=5 redrafter "
    "redrafter:beams=1,length=3 eagle-1 eagle-2 eagle-2:top_k=1,depth=3 eagle-3 auto"
).split()


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
    texts: Sequence[str],
    sampling: SamplingParams | None = None,
    *,
    categories: list[str] | None = None,
    **paired: Any,
) -> list[Run]:
    """Every method on one built-in prompt of each category: all turns, 48 tokens each."""
    done: list[Run] = []
    with Engine.load(model, params, **paired) as engine:
        prompts = select_prompts(read_prompts("builtin"), categories=categories, limit=1)
        methods = with_baseline([parse_method(text) for text in texts])
        plan = Plan(methods, sampling or SamplingParams(), n_predict=48)
        for finished in measure(engine, prompts, plan):
            assert isinstance(finished, list), f"left out: {finished}"
            done += finished
    return done


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, seed=1, top_p=0.95, repeat_penalty=1.1)],
    ids=["greedy", "seeded"],
)
def test_in_f32_no_method_changes_a_text(
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
    every, kinds = [*FEW_ROWS, *MORE], ["chat", "extraction"]
    done = runs(f32_model, EXACT, every, sampling, categories=kinds, **paired)
    assert [run for run in done if run.first_difference is not None] == []
    accepted: Counter[str] = Counter()
    for run in done:
        accepted[run.method] += run.stats.n_accepted
    assert all(n > 0 for method, n in accepted.items() if method != "ar"), accepted
    assert len(accepted) == len(every) + 1


def test_as_shipped_texts_differ_only_where_two_logits_are_close() -> None:
    done = runs(resolve("bundled"), ContextParams(n_threads=1), [*FEW_ROWS, "lookahead"])
    gaps = [run.first_difference.logit_gap for run in done if run.first_difference is not None]
    # In one of these texts, a gap is 0.25 with flash attention, 0.25 without it, 0.35 without it if
    # the reply is decoded in one batch, and 0.05 with an F32 KV cache: the kernels' own noise.
    assert all(gap is not None and abs(gap) < 0.4 for gap in gaps), gaps
    assert len(gaps) < 0.1 * len(done)
    assert len(done) > 60
    assert sum(run.stats.n_accepted for run in done) > 200


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
