"""Cost curves: interpolation, following a text's steps, and places of the context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batching.llama.context import Context
from batching.llama.model import Model
from speculation.auto import learnt
from speculation.auto.calibration import measure_cost
from speculation.drafting.cost import Cost, CostCurve
from tests.support.exact import EXACT


def test_rows_between_two_sizes_cost_as_much_as_the_next_block_of_four() -> None:
    curve = CostCurve((1, 2, 3, 6), (1.0, 2.0, 3.5, 2.0))
    assert [curve.at(n) for n in (1, 2, 3, 4, 5, 6)] == [1.0, 2.0, 3.5, 3.0, 2.0, 2.0]
    assert curve.row_share == pytest.approx(1.0 / 5)
    curve = CostCurve((1, 8, 32), (1.0, 2.0, 5.0))
    assert [curve.at(n) for n in (8, 9, 12, 13, 29, 32)] == [2.0, 2.5, 2.5, 3.0, 5.0, 5.0]
    curve = CostCurve((1, 3), (1.0, 2.0))
    assert [curve.at(n) for n in (1, 2, 3, 4, 5, 100)] == pytest.approx([1, 2, 2, 2.5, 3, 50.5])
    curve = CostCurve((1, 48, 64), (1.0, 3.0, 4.0))
    assert [curve.at(n) for n in (64, 65, 80)] == [4.0, 4.0625, 5.0]


def test_single_rows_set_the_level_and_other_sizes_their_shape() -> None:
    cost = Cost(CostCurve((1, 4, 8), (1.0, 2.0, 3.0)))
    for _ in range(320):
        cost.follow(1, 100, 2.0)
    assert [cost.curve(100).at(n) for n in (1, 4, 8)] == pytest.approx([2.0, 4.0, 6.0], rel=0.05)
    for _ in range(320):
        cost.follow(4, 100, 5.0)
    assert [cost.curve(100).at(n) for n in (1, 4, 8)] == pytest.approx([2.0, 5.0, 6.0], rel=0.05)


def test_one_interrupted_batch_hardly_changes_the_curve() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0)))
    for i in range(640):
        cost.follow(8, 100, 200.0 if i == 600 else 2.0)
    assert cost.curve(100).at(8) == pytest.approx(2.0, rel=0.03)


def test_batches_after_another_size_and_a_texts_first_steps_do_not_count() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0)))
    for _ in range(500):
        cost.begin()
        for seconds in (30.0, 3.0, 2.0, 1.3):
            cost.follow(1, 100, seconds)
        cost.follow(8, 100, 9.0)
    assert (cost.curve(100).at(1), cost.curve(100).at(8)) == (1.0, 2.0)


def test_with_several_texts_batches_after_another_size_count_less_the_switch() -> None:
    cost = Cost(CostCurve((1, 8, 16), (1.0, 2.0, 3.0), switch_seconds=0.5))
    cost.n_texts = 2
    for _ in range(320):
        cost.follow(8, 100, 3.5)
        cost.follow(16, 100, 3.5)
    assert [cost.curve(100).at(n) for n in (8, 16)] == pytest.approx([3.0, 3.0], rel=0.01)


def test_a_recorded_size_is_left_only_for_more_than_recording_it_again_costs() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0), switch_seconds=0.5, record_seconds=4.0))
    curve, extra = cost.curve(0), []
    for n_rows in (8, 8, 1, 8, 1, 1):
        cost.decoded(n_rows)
        extra.append(cost.extra(curve))
    # Two steps at the new size would save two switches of a record's four seconds.
    assert extra == [(3.0, 0.5), (0.0, 4.5), (3.0, 0.5), (3.0, 0.5), (3.0, 0.5), (0.0, 4.5)]


def test_what_a_change_of_size_costs_is_not_learnt_as_the_sizes_own() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0), switch_seconds=0.5, record_seconds=4.0))
    cost.n_texts = 2
    for _ in range(160):
        cost.follow(1, 100, 1.9, n_steps=5)  # 1.5 + 5 + 1 + 1 + 1
        for seconds in (2.5, 6.0, 2.0):
            cost.follow(8, 100, seconds)
    assert [cost.curve(100).at(n) for n in (1, 8)] == pytest.approx([1.0, 2.0])


def test_the_cost_grows_with_n_past_between_the_measured_places_and_beyond() -> None:
    cost = Cost(CostCurve((1, 8), (1.0, 2.0)), CostCurve((1, 8), (2.0, 5.0)))
    # Places have 256 tokens: 640 is the middle of the third, 512 of the 1408 tokens on.
    assert cost.curve(600).at(8) == pytest.approx(2 + 3 * 512 / 1408)
    assert cost.curve(2944).at(1) == pytest.approx(1 + 2816 / 1408, rel=0.01)
    # Attention adds 1 second to one row and 3 to eight: 1 + 2 * 3 / 7 to four.
    cost = Cost(CostCurve((1, 4, 8), (1.0, 1.5, 2.0)), CostCurve((1, 8), (2.0, 5.0)))
    assert cost.curve(1536).at(4) == pytest.approx(1.5 + 1536 / 1408 * 13 / 7)


def test_what_was_learnt_is_saved_and_a_damaged_file_is_measured_anew(
    tiny_model: Path, cache_folder: Path
) -> None:
    with Model(tiny_model) as model, Context(model, EXACT) as context:
        curve = measure_cost(context, sizes=(1, 2, 4), n_past=20, budget_seconds=0.05)
        assert tuple(curve.sizes) == (1, 2, 4)
        assert 0 < curve.at(1) <= min(curve.at(2), curve.at(4))
        cost = Cost(curve, shape=[1.0, 1.1, 1.2])
        path = learnt.file_for(context)
        learnt.save(path, {"states": {"other": {"a": [2.0]}}}, cost, "", {"suffix": [1.0]})
        kept = learnt.load(path)
        assert learnt.cost(kept, context).near.seconds == pytest.approx(curve.seconds)
        assert learnt.cost(kept, context).shape == [1.0, 1.1, 1.2]
        assert learnt.states(kept, "") == {"suffix": [1.0]}
        assert learnt.states(kept, "other") == {"a": [2.0]}
        for broken in ({}, {"cost": {"near": {"sizes": "?"}}}, {"cost": 7, "states": 7}):
            assert learnt.states(broken, "") == {}
            assert tuple(learnt.cost(broken, context).near.sizes) != (1, 2, 4)
        # Other tests save in the same folder.
        files = (cache_folder / "learnt").glob("*.json")
        (file,) = [file for file in files if json.loads(file.read_text()) == kept]
        file.write_text("{", encoding="utf-8")
        assert learnt.load(path) == {}
    assert list((cache_folder / "learnt").glob("*.partial")) == []
