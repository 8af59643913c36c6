"""Cost curves: interpolation, following measured steps, and regions of the context."""

from __future__ import annotations

import pytest

from speculation.auto.cost_curve import CostCurve, CostModel


def test_a_cost_curve_is_linear_between_its_sizes_and_never_falls() -> None:
    curve = CostCurve((1, 2, 4), (1.0, 2.0, 1.5))
    assert [curve.at(n) for n in (1, 2, 3, 4)] == [
        1.0,
        1.5,
        1.5,
        1.5,
    ]  # 2.0 was a disturbed measurement
    curve = CostCurve((1, 3), (1.0, 2.0))
    assert [curve.at(n) for n in (1, 2, 3, 4, 5, 100)] == pytest.approx([1, 1.5, 2, 2.5, 3, 50.5])
    assert curve.row_share == pytest.approx(0.5)


def test_a_cost_curve_follows_the_measured_steps() -> None:
    curve = CostCurve((1, 2, 4, 8), (1.0, 1.5, 2.0, 3.0))
    for _ in range(320):
        curve.follow(4, 4.0)
    assert curve.at(4) == pytest.approx(4.0, rel=0.05)
    assert curve.at(8) >= curve.at(4) >= curve.at(2) > 1.5


def test_the_shape_of_a_curve_follows_only_many_steps() -> None:
    curve = CostCurve((1, 8), (1.0, 2.0))
    shapes: list[float] = []
    for n_steps in (16, 640, 16):
        for _ in range(n_steps // 2):
            curve.follow(1, 1.0)
            curve.follow(8, 3.0 if n_steps == 640 else 2.0 if not shapes else 6.0)
        shapes.append(curve.at(8) / curve.at(1))
    assert shapes[0] == pytest.approx(2.0)
    assert shapes[1] == pytest.approx(3.0, rel=0.1)
    assert shapes[2] < 3.4  # a few steps no longer count for much


def test_each_region_of_the_context_has_its_own_curve() -> None:
    cost = CostModel({0: CostCurve((1, 8), (1.0, 2.0))})
    for _ in range(640):
        cost.follow([(1, 3000, 2.0)])
    assert cost.curve(3000).at(1) == pytest.approx(2.0, rel=0.05)
    assert cost.curve(100).at(1) == 1.0


def test_short_replies_do_not_make_single_rows_look_expensive() -> None:
    cost = CostModel({0: CostCurve((1, 8), (1.0, 2.0), 0.5)})
    for _ in range(500):  # replies
        cost.begin()
        for seconds in (30.0, 3.0, 2.0, 1.3):
            cost.follow([(1, 100, seconds)])
    assert (cost.curve(100).at(1), cost.curve(100).switch_seconds) == (1.0, 0.5)


def test_the_cost_between_measured_regions_grows_with_n_past() -> None:
    cost = CostModel({0: CostCurve((1, 8), (1.0, 2.0)), 1024: CostCurve((1, 8), (2.0, 5.0))})
    # Regions are centred at n_past 128, 384, 768, 1536, 3072; 768 is 640 of the 1408 tokens on.
    assert cost.curve(600).at(8) == pytest.approx(2 + 3 * 640 / 1408)
    assert cost.curve(3000).at(1) == pytest.approx(1 + 2944 / 1408)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, 2.0, 3.0)])
def test_weights_that_do_not_match_the_sizes_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights must be positive, one for each size"):
        CostCurve((1, 2), (1.0, 1.5), 0.0, weights)
