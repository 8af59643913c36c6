"""The table of ``auto`` beside plain decoding and the best single method."""

from __future__ import annotations

from typing import Any

from tools.judge import ratios_of, table


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


def test_a_run_has_ratios_to_plain_decoding_and_to_the_best_single_method() -> None:
    summary = [*rows("a", 20.0, 1.5, 16.0), *rows("b", 8.0, 0.9, 5.0), *rows("c", 20.0, 0.0, 9.0)]
    assert ratios_of(summary) == {"a": (2.0, 1.5, 1.25), "b": (0.8, 0.9, 0.8)}


def test_the_figures_are_medians_over_repetitions() -> None:
    runs = [(2.0, 1.5, 1.25), (2.5, 1.0, 1.0), (1.1, 1.25, 3.0)]
    assert table({("m", "a"): runs, ("m", "all"): runs[:1]}).splitlines() == [
        "| model | prompts | over plain | mean | over best single |",
        "|---|---|---|---|---|",
        "| m | a | 2.00 | 1.25 | 1.25 |",
        "| m | all | 2.00 | 1.50 | 1.25 |",
    ]
