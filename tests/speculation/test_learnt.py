"""What methods learn and keep: bounded by the number of methods, whatever clients write."""

from __future__ import annotations

import json
from pathlib import Path

from speculation.auto.source import Gains
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.engine import Engine
from speculation.methods import SAVED, parse_method
from tests.support.exact import EXACT

STRINGS = [
    f"{method}{n}"
    for n in range(1, 40)
    for method in (
        "prompt-lookup:draft=",
        "suffix:draft_max=",
        "recycling:nodes=",
        "auto:rows_max=",
    )
]


def cheap_rows() -> Cost:
    return Cost(CostCurve.linear(1.0, 0.01))


def test_learnt_state_does_not_grow_with_the_parameters_that_clients_write() -> None:
    resources, sizes = Resources(cheap_rows), []
    for text in STRINGS * 2:
        parse_method(text).drafters(resources)
        sizes.append((len(resources.to_save(SAVED)), len(resources._kept)))
    assert sizes[-1] == sizes[3]
    assert set(resources.to_save(SAVED)) == {
        *("suffix", "recycling", "suffix acceptance", "recycling acceptance"),
        "prompt-lookup acceptance",
    }


def test_what_is_learnt_of_other_methods_and_under_older_names_is_not_saved() -> None:
    old = {"PromptLookupParams(draft=7) estimates": [1.0] * 101, "suffix": [1.0, 2.0]}
    resources = Resources(cheap_rows, saved=old)
    resources.acceptance("outside")
    resources.save("outside", Gains().state)
    assert resources.to_save(SAVED) == {"suffix": [1.0, 2.0]}


def test_what_is_learnt_of_heads_is_saved_by_the_method_or_the_source() -> None:
    assert {"eagle", "eagle-2", "eagle-3", "mtp", "dflash", "medusa", "redrafter"} < SAVED


def test_the_file_of_an_engine_stays_small(tiny_model: Path) -> None:
    with Engine.load(tiny_model, EXACT) as engine:
        engine.resources._kept["cost"] = cheap_rows()
        for text in STRINGS:
            engine.generate("the cat saw a dog", method=text, max_tokens=3).run()
        path = engine._loaded._learnt_file
    states = json.loads(path.read_text(encoding="utf-8"))["states"][""]
    assert {name.split(" ")[0] for name in states} <= SAVED
    assert len(states) < 10
