"""Methods: Jacobi, verification, parsing, recommended sampling, and what is learnt of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.auto.source import Asks
from speculation.drafter import DraftBudget, MethodSpec, Step
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.engine import Engine
from speculation.methods import METHODS, SAVED, MethodTable, load_method_file, parse_method
from speculation.methods.jacobi import Jacobi, JacobiParams
from speculation.recommended import recommended
from speculation.verify import Match
from tests.support.exact import EXACT, PROMPT
from tests.support.paths import ROOT
from tests.support.scripted import ScriptedOutput, ScriptedSampler


def test_jacobi_reuses_the_targets_argmax_after_the_accepted_path() -> None:
    jacobi = Jacobi(JacobiParams(guesses=4))
    jacobi.begin([5, 6])
    tree = TokenTree(6)
    jacobi.draft([5, 6], tree, DraftBudget())
    assert tree.tokens == [6, 6, 6, 6, 6]
    # One guess is accepted; the bonus is 31; the argmax of nodes 2 to 4 is 32, 33, 34.
    jacobi.observe(Step(tree, ScriptedOutput([6, 31, 32, 33, 34]), [0, 1], 31))
    tree = TokenTree(31)
    jacobi.draft([5, 6, 6, 31], tree, DraftBudget())
    assert tree.tokens == [31, 32, 33, 34, 34]


def test_verification_follows_each_sampled_token_in_all_branches() -> None:
    tree = TokenTree(1)
    a = tree.add(0, 2)
    tree.add(0, 3)
    b = tree.add(a, 4)
    sampler = ScriptedSampler([2, 4, 9])
    assert Match().verify(tree, ScriptedOutput(), sampler) == ([0, a, b], 9)
    assert sampler.rows == [0, a, b]
    tree = TokenTree(1)
    first = tree.add(0, 2, merge=False)
    second = tree.add(0, 2, merge=False)
    tree.add(first, 5, merge=False)
    end = tree.add(second, 6, merge=False)
    sampler = ScriptedSampler([2, 6, 7])
    assert Match().verify(tree, ScriptedOutput(), sampler) == ([0, second, end], 7)


def test_a_method_is_written_with_parameters_after_a_colon() -> None:
    method = parse_method("lookahead:window=7, ngram=4")
    assert (method.params.window, method.params.ngram, method.params.guesses) == (7, 4, 15)
    assert str(method) == "lookahead:window=7,ngram=4"
    assert parse_method("suffix:memory=off").params.memory is False
    assert str(parse_method("ar")) == "ar"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lokahead", "no method 'lokahead'; give one of auto, ar"),
        ("lookahead:windo=3", "has no parameter 'windo'; give some of window, ngram"),
        ("lookahead:window", "lookahead: window has no value; write window=value"),
        ("lookahead:window=3,ngram=4,window=5", "lookahead: window is given twice; give it once"),
        ("lookahead:window=many", "window is 'many'; give a value like 15"),
        ("suffix:memory=perhaps", "memory is 'perhaps'; give on or off"),
        ("lookahead:ngram=2", "ngram is 2; give 3 to 32"),
        ("prompt-lookup:draft=0", "draft is 0; give 1 to"),
        ("auto:sources=all+draft", "sources contains 'all'; give all, or some of prediction, suf"),
        ("jacobi:guesses=0", "guesses is 0; give 1 to 256"),
        ("ar:x=1", "ar has no parameter 'x'; it has none"),
        (f"eagle-1:choices={'.'.join('0' * 17)}", "choices go 17 deep; the limit is 16"),
        (
            f"eagle-1:choices={'/'.join(f'{a}.0' for a in range(20))}",
            "choices expand 20 nodes of a level; the limit is 16",
        ),
        (
            f"eagle-1:choices={'/'.join(f'{a}.{b}' for a in range(20) for b in range(20))}",
            "420 nodes; the limit is 255",
        ),
        ("eagle-1:choices=0.0/x", "choices has 'x'; give paths of ranks like 0.0.0.0/0.1.0"),
        ("eagle-1:choices=0//1", "choices has ''"),
        ("eagle-1:choices=0.64", "choices has '0.64'; .* from 0, the likeliest, to 63"),
        ("eagle-1:choices=0.-1", "choices has '0.-1'"),
        ("redrafter:beams=64,length=32", "may be 2048 nodes; the limit is 255"),
        ("lookahead:window=128,guesses=128", "window 128 and guesses 128 need 257 sequences"),
    ],
)
def test_a_malformed_method_is_refused_with_a_correction(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        parse_method(text)


def test_a_method_can_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_specs", dict(METHODS._specs))
    name = load_method_file(f"{ROOT / 'examples' / 'bigrams.py'}:spec:length=2")
    assert name == "bigrams:length=2"
    method = parse_method(name)
    assert str(method) == "bigrams:length=2"
    (drafter,) = method.drafters()
    tree = TokenTree(1)
    drafter.draft([1, 2, 3, 1], tree, DraftBudget())
    assert tree.tokens == [1, 2, 3]
    name = load_method_file(f"{ROOT / 'examples' / 'forks.py'}:spec:length=2")
    (drafter,) = parse_method(name).drafters()
    text, tree = [1, 2, 7, 5, 1, 2, 8, 9, 1, 2], TokenTree(2)
    drafter.begin(text[:1])
    assert drafter.promise(text) == 0.5
    drafter.draft(text, tree, DraftBudget())
    assert (tree.tokens, tree.parents) == ([2, 8, 9, 7, 5], [-1, 0, 1, 0, 3])
    assert load_method_file("prompt-lookup:draft=2") == "prompt-lookup:draft=2"
    for file_name, code, reason in (
        ("wrong.py", "spec = 1", "wrong.py:spec is not a MethodSpec"),
        ("failing.py", "1 / 0", "failing.py failed: ZeroDivisionError"),
        ("nowhere.py", None, "file not found"),
    ):
        file = tmp_path / file_name
        if code is not None:
            file.write_text(code)
        with pytest.raises(InvalidParameter, match=reason):
            load_method_file(f"{file}:spec")


def test_packages_add_methods_by_entry_points_and_broken_ones_are_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outside = MethodSpec("outside", "Outside", lambda params, resources: None)
    points = [
        SimpleNamespace(name="outside", value="a:spec", load=lambda: outside),
        SimpleNamespace(name="broken", value="b:spec", load=lambda: 1 / 0),
        SimpleNamespace(name="again", value="c:spec", load=lambda: replace(outside)),
    ]
    monkeypatch.setattr("speculation.methods.table.entry_points", lambda group: points)
    table = MethodTable([])
    assert list(table) == ["outside"]
    left_out = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert left_out == ["broken", "again"]


METHODS_OF_CLIENTS = "prompt-lookup:draft suffix:draft_max recycling:nodes auto:rows_max".split()
STRINGS = [f"{method}={n}" for n in range(1, 40) for method in METHODS_OF_CLIENTS]


def cheap_rows() -> Cost:
    return Cost(CostCurve.linear(1.0, 0.01))


def test_learnt_state_does_not_grow_with_the_parameters_that_clients_write() -> None:
    resources, sizes = Resources(cheap_rows), []
    for text in STRINGS * 2:
        parse_method(text).drafters(resources)
        sizes.append((len(resources.to_save(SAVED)), len(resources.kept.objects)))
    assert sizes[-1] == sizes[3]
    assert set(resources.to_save(SAVED)) == {
        *("suffix", "suffix acceptance", "recycling acceptance"),
        "prompt-lookup acceptance",
    }


def test_what_is_learnt_is_saved_by_method_or_source_and_no_more() -> None:
    old = {"PromptLookupParams(draft=7) estimates": [1.0] * 101, "suffix": [1.0, 2.0]}
    resources = Resources(cheap_rows, saved=old)
    resources.acceptance("outside")
    resources.learnt("outside", Asks)
    assert resources.to_save(SAVED) == {"suffix": [1.0, 2.0]}
    assert {"eagle", "eagle-2", "eagle-3", "mtp", "dflash", "medusa", "redrafter"} < SAVED


def test_the_file_of_an_engine_stays_small(tiny_model: Path) -> None:
    with Engine.load(tiny_model, EXACT) as engine:
        engine.resources.kept.cost = cheap_rows()
        for text in STRINGS:
            engine.generate("the cat saw a dog", method=text, max_tokens=3).run()
        path = engine._runtime._learnt_file
    states = json.loads(path.read_text(encoding="utf-8"))["states"][""]
    assert {name.split(" ")[0] for name in states} <= SAVED
    assert len(states) < 10


def test_damaged_numbers_keep_no_text_from_being_written(tiny_model: Path) -> None:
    for number in ("7", "-1e200", "1e200", "NaN", "null"):
        with Engine.load(tiny_model, EXACT) as engine:
            engine.resources.kept.cost = cheap_rows()
            text = engine.generate(PROMPT, method="auto:sources=suffix", max_tokens=20).run()
            assert len(text.token_ids) == 20
            path = engine._runtime._learnt_file
        kept = json.loads(path.read_text(encoding="utf-8"))
        learnt = kept["states"][""]
        assert all(-20 < value < 20 for values in learnt.values() for value in values), number
        damaged = re.sub(r"-?\d[\d.e-]*", number, json.dumps(learnt))
        path.write_text(json.dumps(kept).replace(json.dumps(learnt), damaged), encoding="utf-8")


QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def nothing(key: str) -> None:
    return None


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("qwen3-0.6b", QWEN3),
        ("qwen3-4b-instruct-2507", {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ("hf:bartowski/x/Qwen_Qwen3-14B-Q4_K_M.gguf", QWEN3),
        ("/models/TinyLlama-1.1B.gguf", {}),
        ("qwen3.5-4b", {}),
        ("bundled", {}),
    ],
)
def test_models_txt_has_it_for_a_model_or_its_family(model: str, found: dict[str, float]) -> None:
    assert recommended(model, nothing) == found


def test_models_txt_and_the_file_recommend_sampling() -> None:
    own = {"general.sampling.temp": "0.300000", "general.sampling.penalty_repeat": "1.1"}
    assert recommended("qwen3-0.6b", own.get) == {"temperature": 0.3, "repeat_penalty": 1.1}
    for odd in ("-1", "nan", "x"):
        assert recommended("qwen3-0.6b", {"general.sampling.temp": odd}.get) == QWEN3
