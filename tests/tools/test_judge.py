"""The table of ``auto`` beside plain decoding and the best single method."""

from __future__ import annotations

from typing import Any

from tools.judge import Ratios, add_ratios, table


def rows(category: str, auto: float, mean: float, suffix: float) -> list[dict[str, Any]]:
    speeds = {"ar": 10.0, "suffix": suffix, "auto": auto}
    return [
        {
            "category": category,
            "method": method,
            "tokens_per_second": speed,
            "speed_up_overall": speed / 10.0,
            "speed_up_mean": mean,
        }
        for method, speed in speeds.items()
    ]


def test_the_figures_are_medians_over_repetitions_of_speed_ratios() -> None:
    ratios: Ratios = {}
    for auto in (20.0, 25.0, 11.0):
        add_ratios(ratios, [*rows("a", auto, 1.5, 16.0), *rows("b", 8.0, 0.9, 5.0)])
        add_ratios(ratios, rows("all", 15.0, 1.4, 12.0))
    assert table({"m": ratios}).splitlines() == [
        "| model | over plain | lowest | over best single | lowest |",
        "|---|---|---|---|---|",
        "| m | 1.50 (1.40) | 0.80 b | 1.25 | 0.80 b |",
        "",
        "| over plain (best single) | m |",
        "|---|---|",
        "| a | 2.00 (1.25) |",
        "| b | 0.80 (0.80) |",
        "| all | 1.50 (1.25) |",
    ]


def test_a_category_whose_replies_end_in_the_first_step_has_no_ratio() -> None:
    ratios: Ratios = {}
    add_ratios(ratios, [*rows("a", 20.0, 0.0, 10.0), *rows("all", 20.0, 2.0, 10.0)])
    assert ratios["plain"] == {"all": [2.0]}
